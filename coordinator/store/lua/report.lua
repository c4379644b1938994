-- Keep a verifier's own telemetry, renew its lease and its live sessions' placements, and tell what is known of these.
-- KEYS: 1 verifier:<id> HASH, 2 placements:<id> ZSET, 3 fleet ZSET, 4 cordon:<id> STRING, 5 waiting ZSET,
--       6 counted:<id> STRING, then tenant-places:<tenant> ZSET of each tenant; and session:<id> HASH of each live
--       session, by the prefix in ARGV
-- ARGV: 1 telemetry, 2 JSON of: verifier (its id), instance, live (sessions), draining (0 or 1), lease_ms, which
--       placements last as well, session_ms to keep the record of a session, renew_ms after which that is renewed, batch
--       (number of the batch of tokens, 0: none), batch_ms to keep that, tenants, session_key (prefix), and of the live
--       sessions, each one list, ids, epochs (20 digits, so that text compares as numbers do) and the numbers of their
--       tenants (0 none)
-- Returns {1, whether this instance shall drain (0 or 1), whether the batch of tokens is new (0 or 1), whether a tenant
--       waits for a place at the target (0 or 1), the time (ms), JSON of a list for each session: its state, tenant, weights hash,
--       draft release, traffic class, id of the device for trials of drafts, and window bounds, '' where it was placed
--       without}. States: '' live, killed, closed by its device, moved: another verifier has reported it in
--       a greater epoch;
--      or {0} if the lease is lost or another instance holds it: the verifier has to register again.
local told = cjson.decode(ARGV[2])
if redis.call('HGET', KEYS[1], 'instance') ~= told.instance then
  return {0}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now_text = string.format('%.0f', now)
local lease_end = string.format('%.0f', now + told.lease_ms)

redis.call('HSET', KEYS[1], 'live', told.live, 'draining', told.draining, 'telemetry', ARGV[1])
redis.call('PEXPIRE', KEYS[1], told.lease_ms)
redis.call('ZADD', KEYS[3], lease_end, told.verifier)

-- The tokens of a report whose answer was lost come again, with the same number. 0: there are none.
local fresh = told.batch > 0
if fresh then
  local instance, counted = string.match(redis.call('GET', KEYS[6]) or '', '^(%d+) (%d+)$')
  fresh = instance ~= told.instance or told.batch > tonumber(counted)
  if fresh then redis.call('SET', KEYS[6], string.format('%s %.0f', told.instance, told.batch), 'PX', told.batch_ms) end
end

-- Add members with a score to a sorted set, in commands that Lua's stack has room for.
local function add_all(key, score, members)
  for from = 1, #members, 1000 do
    local part = {}
    for i = from, math.min(from + 999, #members) do
      part[#part + 1] = score
      part[#part + 1] = members[i]
    end
    redis.call('ZADD', key, unpack(part))
  end
end

local answer, held, ended = {}, {}, {}
local of_tenant = {}
for i = 1, #told.tenants do of_tenant[i] = {} end
for i, id in ipairs(told.ids) do
  local epoch, of, record = told.epochs[i], told.numbers[i], told.session_key .. id
  local known = redis.call('HMGET', record, 'closed', 'live', 'epoch', 'reporter',
    'tenant', 'weights', 'draft', 'traffic', 'device', 'bounds')
  local state = known[1] == 'killed' and 'killed' or known[1] and 'closed' or ''
  if state == '' then
    held[#held + 1] = id
    if of > 0 then table.insert(of_tenant[of], id) end
    local seen = tonumber(known[2] or '0')
    local last = known[3] or ''
    if epoch < last then
      state = 'moved'
    elseif epoch > last or known[4] ~= told.verifier or now - seen > told.renew_ms then
      redis.call('HSET', record, 'live', now_text, 'epoch', epoch, 'reporter', told.verifier)
      redis.call('PEXPIRE', record, told.session_ms)
      if of > 0 then redis.call('HSETNX', record, 'tenant', told.tenants[of]) end
    end
  else
    ended[#ended + 1] = id
  end
  local facts = {state}
  for part = 5, 10 do
    facts[#facts + 1] = known[part] or ''
  end
  answer[i] = facts
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_text)
add_all(KEYS[2], lease_end, held)
for from = 1, #ended, 1000 do
  redis.call('ZREM', KEYS[2], unpack(ended, from, math.min(from + 999, #ended)))
end
redis.call('PEXPIRE', KEYS[2], 86400000) -- so that a verifier that never returns leaves nothing
for i = 1, #told.tenants do
  local places = KEYS[6 + i]
  redis.call('ZREMRANGEBYSCORE', places, '-inf', now_text)
  add_all(places, lease_end, of_tenant[i])
  redis.call('PEXPIRE', places, 86400000)
end
local drain = redis.call('GET', KEYS[4])
if drain then redis.call('PEXPIRE', KEYS[4], 2592000000) end -- a cordon is forgotten 30 days after its verifier
local waited = redis.call('ZCOUNT', KEYS[5], now_text, '+inf') > 0
return {1, drain == told.instance and 1 or 0, fresh and 1 or 0, waited and 1 or 0, now_text, #answer > 0 and cjson.encode(answer) or '[]'}
