-- Note that a coordinator's key is valid no longer, so that its coordinator makes another one and none takes its tickets.
-- KEYS: 1 public-keys ZSET, 2 public-key-proofs HASH, 3 revoked-keys ZSET
-- ARGV: 1 key id, 2 most revoked keys that are kept, the latest
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', KEYS[3], 'NX', string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -1 - tonumber(ARGV[2]))
for _, entry in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if string.sub(entry, 1, #ARGV[1] + 1) == ARGV[1] .. ':' then
    redis.call('ZREM', KEYS[1], entry)
    redis.call('HDEL', KEYS[2], entry)
  end
end
return 1
