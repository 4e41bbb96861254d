-- One engine batch in one atomic step; base.py has the table of outcomes, redis.py the keys.
-- It never reads a row before it writes: rows are absolute.
-- KEYS  meta, table, stream, counter
-- ARGV  epoch, first, last, reset (0 or 1), worker, changes, stream length,
--       how many keys to delete, those keys, then key and row alternating
local meta = redis.call('HMGET', KEYS[1], 'e', 'l', 'g')
local epoch, last = tonumber(meta[1]) or 0, tonumber(meta[2]) or -1
if epoch ~= tonumber(ARGV[1]) or meta[3] then return {'stale', epoch} end
if tonumber(ARGV[3]) <= last then return {'repeat', last} end
if ARGV[4] == '0' and tonumber(ARGV[2]) > last + 1 then return {'gap', last + 1} end

if ARGV[4] == '1' then redis.call('UNLINK', KEYS[2]) end
local first_row = 9 + tonumber(ARGV[8])
for i = 9, first_row - 1, 4000 do
  redis.call('HDEL', KEYS[2], unpack(ARGV, i, math.min(i + 3999, first_row - 1)))
end
for i = first_row, #ARGV, 4000 do -- even, so that a key stays with its row
  redis.call('HSET', KEYS[2], unpack(ARGV, i, math.min(i + 3999, #ARGV)))
end
redis.call('HSET', KEYS[1], 'l', ARGV[3])
local n = redis.call('INCR', KEYS[4])
local id = redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[7], '*', 'v', '2', 'n', n,
  'w', ARGV[5], 'e', ARGV[1], 'l', ARGV[3], 'c', ARGV[6])
return {'applied', id, n}
