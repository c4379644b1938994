-- Take samples of a canary and of the release beside it from sessions' cumulative counts. A sample is a span of one
-- session's positions with one release: the difference of its counts between two reports, so that it does not matter
-- which verifier reported them. Counts that begin again, with another release or on another verifier, begin a new span.
-- KEYS: 1 samples LIST, 2 sampled HASH, then span:<session> HASH of each session
-- ARGV: 1 name of the trial, 2 least positions of a span, 3 most positions of a span, 4 positions up to which counts of
--       a session that is new here are counted from 0, 5 most samples of a session and arm, 6 most of a tenant's either
--       arm, 7 most of either arm, 8 ms to keep samples, 9 ms to keep spans, then 7 for each session: arm (c or s),
--       release, epoch (20 digits), tenant, class, positions, positions whose first proposal was accepted
-- Returns the number of samples added. A tenant has at most half of the room that the others leave in an arm, so that
-- another one always finds some. If one arm is full, of a tenant or of all, the other arm gets no more either: there is
-- nothing of its time to compare it with.
local HEAD, EACH = 9, 7
local trial, least, most, fresh = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local of_session, of_arm, tenants = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local function count(field)
  return tonumber(redis.call('HGET', KEYS[2], field) or '0')
end

local function room(tenant)
  local c, s = count('c:' .. tenant), count('s:' .. tenant)
  if c + s == 0 and count('tenants') >= tenants then
    return false
  end
  return math.max(count('c') + c, count('s') + s) < of_arm -- its own count twice: at most half of what others leave
end

local time = redis.call('TIME')
local ms = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))

local added = 0
for i = 3, #KEYS do
  local at = HEAD + (i - 3) * EACH
  local arm, release, epoch, tenant, class = unpack(ARGV, at + 1, at + 5)
  local positions, accepted = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  local known = redis.call('HMGET', KEYS[i], 'trial', 'release', 'epoch', 'positions', 'accepted', 'c', 's')
  local same_trial = known[1] == trial
  local same = same_trial and known[2] == release
  if not (same_trial and epoch < known[3]) then -- else the report is of a verifier that has lost the session
    local from_positions, from_accepted = tonumber(known[4] or '0'), tonumber(known[5] or '0')
    local taken = {c = same_trial and tonumber(known[6]) or 0, s = same_trial and tonumber(known[7]) or 0}
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
      if taken[arm] < of_session and room(tenant) then
        redis.call('RPUSH', KEYS[1], table.concat({arm, tenant, class, span_accepted, span, ms}, ':'))
        if count('c:' .. tenant) + count('s:' .. tenant) == 0 then
          redis.call('HINCRBY', KEYS[2], 'tenants', 1)
        end
        redis.call('HINCRBY', KEYS[2], arm .. ':' .. tenant, 1)
        redis.call('HINCRBY', KEYS[2], arm, 1)
        taken[arm] = taken[arm] + 1
        added = added + 1
      end
    end
    redis.call('HSET', KEYS[i], 'trial', trial, 'release', release, 'epoch', epoch,
      'positions', from_positions, 'accepted', from_accepted, 'c', taken.c, 's', taken.s)
    redis.call('PEXPIRE', KEYS[i], ARGV[9])
  end
end
if added > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[8])
  redis.call('PEXPIRE', KEYS[2], ARGV[8])
end
return added
