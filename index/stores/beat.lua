-- Which ingests live, by this server's clock, so that nobody else's matters.
-- KEYS  beats
-- ARGV  nothing, to ask; or an ingest and for how many milliseconds it lives, 0 = it leaves
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if #ARGV == 0 then
  return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
return 0
