-- A verifier's load, the seats that its live sessions hold, and the renewal of its lease; what operators want of it.
-- KEYS: 1 verifier:<id> HASH, 2 seats:<id> ZSET, 3 fleet ZSET, 4 cordon:<id> STRING, then closed:<session> STRING and
--       session:<session> HASH, a pair for each live session
-- ARGV: 1 verifier id, 2 instance, 3 lease ms, 4 seat ms, 5 number of load fields and values, then those,
--       then the ids of all live sessions
-- Returns {1, whether this instance shall drain (0 or 1), {ids of sessions that were killed}, {tenant, weights hash,
--       draft release and traffic class of each session: '' where it was not placed with a draft}}, or {0} where the
--       lease was lost or another instance holds it: the verifier has to register again.
if redis.call('HGET', KEYS[1], 'instance') ~= ARGV[2] then
  return {0}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease_end = string.format('%.0f', now + tonumber(ARGV[3]))
local seat_end = string.format('%.0f', now + tonumber(ARGV[4]))

local sessions_from = 6 + tonumber(ARGV[5])
for i = 6, sessions_from - 1, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[3], lease_end, ARGV[1])

local killed, facts = {}, {}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
for i = sessions_from, #ARGV do
  local at = 5 + 2 * (i - sessions_from)
  local closed = redis.call('GET', KEYS[at])
  if not closed then
    redis.call('ZADD', KEYS[2], seat_end, ARGV[i])
  elseif closed == 'killed' then
    redis.call('ZREM', KEYS[2], ARGV[i])
    killed[#killed + 1] = ARGV[i]
  end
  for _, value in ipairs(redis.call('HMGET', KEYS[at + 1], 'tenant', 'weights', 'draft', 'traffic')) do
    facts[#facts + 1] = value or ''
  end
end
redis.call('PEXPIRE', KEYS[2], 86400000) -- only so that a verifier that never returns leaves nothing
local drain = redis.call('GET', KEYS[4]) == ARGV[2]
redis.call('PEXPIRE', KEYS[4], 2592000000) -- a cordon is forgotten 30 days after its verifier
return {1, drain and 1 or 0, killed, facts}
