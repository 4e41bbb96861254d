-- Beginning, end and trust of a worker's life, each one atomic step; keys as in redis.py.
-- KEYS  meta, table of the life that ends, stream, counter, workers
-- ARGV  begin | known | forget, epoch ('' = first contact), worker, changes, stream length,
--       known: what to keep; forget: seconds the tombstone lives
local meta = redis.call('HMGET', KEYS[1], 'e', 'g')
local stored, gone = tonumber(meta[1]) or 0, meta[2]
local given = tonumber(ARGV[2]) or 0
local living = stored > 0 and not gone

local function tell(epoch)
  local n = redis.call('INCR', KEYS[4])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'v', '2', 'n', n,
    'w', ARGV[3], 'e', epoch, 'l', '', 'c', ARGV[4])
end

if ARGV[1] == 'begin' then
  if living and stored ~= given then return stored end
  local epoch = math.max(stored, given) + 1
  redis.call('HDEL', KEYS[1], 'l', 'k', 'g')
  redis.call('HSET', KEYS[1], 'e', epoch)
  redis.call('PERSIST', KEYS[1])
  redis.call('UNLINK', KEYS[2])
  redis.call('SADD', KEYS[5], ARGV[3])
  tell(epoch)
  return epoch
end

if not living or stored ~= given then return 0 end
if ARGV[1] == 'known' then
  redis.call('HSET', KEYS[1], 'k', ARGV[6])
else
  redis.call('HDEL', KEYS[1], 'l', 'k')
  redis.call('HSET', KEYS[1], 'g', '1')
  redis.call('EXPIRE', KEYS[1], ARGV[6])
  redis.call('UNLINK', KEYS[2])
  redis.call('SREM', KEYS[5], ARGV[3])
end
tell(stored)
return stored
