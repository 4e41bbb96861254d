-- One engine batch in one atomic step; base.py has the table of outcomes, redis.py the keys.
-- It never reads a row before it writes: rows are absolute.
-- KEYS  meta, table, stream, newest entry
-- ARGV  epoch, first, last, reset (0 or 1), worker, changes, stream length,
--       how many keys to delete, those keys, then key and row alternating
local meta = redis.call('HMGET', KEYS[1], 'e', 'l', 'g')
local epoch, last = tonumber(meta[1]) or 0, tonumber(meta[2]) or -1
if epoch ~= tonumber(ARGV[1]) or meta[3] then return {'stale', epoch} end
if tonumber(ARGV[3]) <= last then return {'repeat', last} end
if ARGV[4] == '0' and tonumber(ARGV[2]) > last + 1 then return {'gap', last + 1} end

if ARGV[4] == '1' then redis.call('HINCRBY', KEYS[1], 'o', 1) end
if last < 0 or ARGV[4] == '1' then -- begins empty, even where a lost life left a table behind
  redis.call('UNLINK', KEYS[2])
  redis.call('HSET', KEYS[2], '', '') -- stays as long as the table does, rows or none
end
local first_row = 9 + tonumber(ARGV[8])
for i = 9, first_row - 1, 4000 do
  redis.call('HDEL', KEYS[2], unpack(ARGV, i, math.min(i + 3999, first_row - 1)))
end
for i = first_row, #ARGV, 4000 do -- even, so that a key stays with its row
  redis.call('HSET', KEYS[2], unpack(ARGV, i, math.min(i + 3999, #ARGV)))
end
local newest = redis.call('HMGET', KEYS[4], 'n', 'i')
local n = (tonumber(newest[1]) or 0) + 1
local id = redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[7], '*', 'v', '2', 'n', n,
  'p', newest[2] or '0-0', 'w', ARGV[5], 'e', ARGV[1], 'l', ARGV[3], 'c', ARGV[6])
redis.call('HSET', KEYS[4], 'n', n, 'i', id)
redis.call('HSET', KEYS[1], 'l', ARGV[3], 'h', id)
return {'applied', id, n}
