-- Take samples of a canary and of the release beside it from sessions' cumulative counts. A sample is a span of one
-- session's positions with one release: the difference of its counts between two reports, so that it does not matter
-- which verifier reported them. Counts that begin again, with another release or on another verifier, begin a new span.
-- KEYS: 1 samples HASH, then span:<session> HASH of each session
-- ARGV: 1 name of the trial, 2 least positions of a span, 3 most positions of a span, 4 positions up to which counts of
--       a session that is new here are counted from 0, 5 most samples of one arm for each of the other, 6 most tenants,
--       7 ms to keep samples, 8 ms to keep spans, then 6 for each session: arm (c or s), release, epoch (20 digits),
--       tenant, positions, positions whose first proposal was accepted
-- Returns the number of samples added. A session gives one to each arm. A tenant's arms are filled in step, so that both
-- are of the same time: traffic changes while a trial runs.
local HEAD, EACH = 8, 6
local trial, least, most, fresh = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local ratio, tenants = tonumber(ARGV[5]), tonumber(ARGV[6])

-- Return number, sum and sum of squares of a tenant's samples.
local function samples(arm, tenant)
  local count, total, squares = string.match(redis.call('HGET', KEYS[1], arm .. ':' .. tenant) or '', '^(%S+) (%S+) (%S+)$')
  return tonumber(count or '0'), tonumber(total or '0'), tonumber(squares or '0')
end

local function add(arm, tenant, acceptance)
  local count, total, squares = samples(arm, tenant)
  local beside = samples(arm == 'c' and 's' or 'c', tenant)
  if count >= ratio * (beside + 1) or (count + beside == 0 and redis.call('HLEN', KEYS[1]) >= 2 * tenants) then
    return 0
  end
  redis.call('HSETNX', KEYS[1], 'c:' .. tenant, '0 0 0')
  redis.call('HSETNX', KEYS[1], 's:' .. tenant, '0 0 0')
  local text = string.format('%d %.9g %.9g', count + 1, total + acceptance, squares + acceptance * acceptance)
  redis.call('HSET', KEYS[1], arm .. ':' .. tenant, text)
  return 1
end

local added = 0
for i = 2, #KEYS do
  local at = HEAD + (i - 2) * EACH
  local arm, release, epoch, tenant = unpack(ARGV, at + 1, at + 4)
  local positions, accepted = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local known = redis.call('HMGET', KEYS[i], 'trial', 'release', 'epoch', 'positions', 'accepted', 'taken')
  local same_trial = known[1] == trial
  local same = same_trial and known[2] == release
  local taken = same_trial and known[6] or ''
  if not (same_trial and epoch < known[3]) then -- else the report is of a verifier that has lost the session
    local from_positions, from_accepted = tonumber(known[4] or '0'), tonumber(known[5] or '0')
    if not same or positions < from_positions or accepted < from_accepted then
      from_positions, from_accepted = 0, 0
      if positions > fresh then
        from_positions, from_accepted = positions, accepted
      end
    end
    local span, span_accepted = positions - from_positions, accepted - from_accepted
    if span > most or span_accepted > span then -- impossible counts, or a span of unknown age
      from_positions, from_accepted = positions, accepted
    elseif span >= least then
      from_positions, from_accepted = positions, accepted
      if not string.find(taken, arm) and add(arm, tenant, span_accepted / span) == 1 then
        taken = taken .. arm
        added = added + 1
      end
    end
    redis.call('HSET', KEYS[i], 'trial', trial, 'release', release, 'epoch', epoch,
      'positions', from_positions, 'accepted', from_accepted, 'taken', taken)
    redis.call('PEXPIRE', KEYS[i], ARGV[8])
  end
end
if added > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[7])
end
return added
