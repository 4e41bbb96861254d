-- Beginning, end and trust of a worker's life, each one atomic step; keys as in redis.py.
-- KEYS  meta, table of the life that ends, stream, newest entry, workers, beats
-- ARGV  begin | known | forget, epoch ('' = first contact), worker, changes, stream length,
--       known: what to keep; forget: seconds the tombstone lives,
--       known: the ingest that says it
local meta = redis.call('HMGET', KEYS[1], 'e', 'g')
local stored, gone = tonumber((meta[1] or ''):match('^%d+$')) or 0, meta[2]
local given = tonumber(ARGV[2]) or 0
local living = stored > 0 and not gone

local function tell(epoch)
  local newest = redis.call('HMGET', KEYS[4], 'n', 'i')
  local n = (tonumber(newest[1]) or 0) + 1
  local id = redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'v', '2', 'n', n,
    'p', newest[2] or '0-0', 'w', ARGV[3], 'e', epoch, 'l', '', 'c', ARGV[4])
  redis.call('HSET', KEYS[4], 'n', n, 'i', id)
end

local function drop_known(stays) -- of every ingest for which `stays` has no entry
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if field:sub(1, 2) == 'k:' and not stays[field:sub(3)] then
      redis.call('HDEL', KEYS[1], field)
    end
  end
end

if ARGV[1] == 'begin' then
  if stored == 0 and redis.call('SISMEMBER', KEYS[5], ARGV[3]) == 1 then
    -- its facts were thrown away: a life has a step of the stream at least, so none had this number
    stored = tonumber(redis.call('HGET', KEYS[4], 'n')) or 0
  end
  if living and stored ~= given then return stored end
  local epoch = math.max(stored, given) + 1
  drop_known({})
  redis.call('HDEL', KEYS[1], 'l', 'g', 'h')
  redis.call('HSET', KEYS[1], 'e', epoch)
  redis.call('PERSIST', KEYS[1])
  redis.call('UNLINK', KEYS[2])
  redis.call('SADD', KEYS[5], ARGV[3])
  tell(epoch)
  return epoch
end

if not living or stored ~= given then return 0 end
if ARGV[1] == 'known' then
  local time, stays = redis.call('TIME'), {}
  local now = string.format('(%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], now, '+inf')) do
    stays[one] = true
  end
  drop_known(stays)
  redis.call('HSET', KEYS[1], 'k:' .. ARGV[7], ARGV[6])
  redis.call('SADD', KEYS[5], ARGV[3]) -- where the set was lost, it is whole again with time
else
  drop_known({})
  redis.call('HDEL', KEYS[1], 'l', 'h', 'o')
  redis.call('HSET', KEYS[1], 'g', '1')
  redis.call('EXPIRE', KEYS[1], ARGV[6])
  redis.call('UNLINK', KEYS[2])
  redis.call('SREM', KEYS[5], ARGV[3])
end
tell(stored)
return stored
