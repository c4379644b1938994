-- Forget a session that is over, but for that, and free its place.
-- KEYS: 1 session:<id> HASH, 2 tenant-places:<tenant> ZSET of its tenant, then placements:<verifier> ZSET and
--       telemetry:<verifier> HASH of each verifier that may hold a place for it
-- ARGV: 1 session id, 2 closed or killed: nothing gives a session that was killed a place again, 3 ms for which one of its
--       tickets may be valid, or prove ownership
-- Returns 1, or 0 if it was killed before.
if redis.call('HGET', KEYS[1], 'closed') == 'killed' and ARGV[2] ~= 'killed' then
  return 0
end
redis.call('ZREM', KEYS[2], ARGV[1])
for i = 3, #KEYS, 2 do
  redis.call('ZREM', KEYS[i], ARGV[1])
  redis.call('HDEL', KEYS[i + 1], ARGV[1])
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'closed', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
