-- Keep what a verifier reports about sessions, and add the outcomes of their devices' proposals to the priors.
--
-- The acceptance history of a session is added to the prior of its workload key: a report holds the last outcomes, of
-- which those beyond the number that was added already are new (a proposal that arrived late may insert one in between;
-- then a neighbour counts for it). Of a session with more positions than a report holds, only whole windows of positions
-- are added. Of a session that has gone on for long while nothing was kept of it, the outcomes may have been added
-- already, and are left out.
--
-- KEYS: 1 telemetry:<verifier> HASH, then prior:<workload key> HASH of each workload key
-- ARGV: 1 ms to keep the telemetry, 2 most positions of a report's history, 3 most outcomes of a workload key, 4 ms to keep
--       them, 5 JSON of a list for each session: its id, epoch (20 digits), committed, acceptance history (one digit each,
--       the last one the newest; '' if the session has no workload key), draft ms, nodes per level, number of its workload
--       key among those of KEYS (0 none); then the telemetry of each session
local WINDOW, KEPT = tonumber(ARGV[2]), tonumber(ARGV[3])
local told = cjson.decode(ARGV[5])
local sessions = #told
local priors = {}

-- A known value moves by 5% at most with each session that brings outcomes: no single device moves it far. 0 is unknown.
local function follow(known, reported)
  if reported <= 0 or known <= 0 then return math.max(known, reported) end
  return math.max(known / 1.05, math.min(known * 1.05, reported))
end

local function fold(number, fresh, draft_ms, per_level)
  local prior = priors[number]
  if not prior then
    local known = redis.call('HMGET', KEYS[1 + number], 'acceptance_history', 'draft_ms', 'nodes_per_level')
    prior = {known[1] or '', tonumber(known[2] or '0'), tonumber(known[3] or '0')}
    priors[number] = prior
  end
  prior[1] = string.sub(prior[1] .. fresh, -KEPT)
  prior[2], prior[3] = follow(prior[2], draft_ms), follow(prior[3], per_level)
end

local ids, written = {}, {}
for i = 1, sessions do
  ids[i] = told[i][1]
end
local known = sessions > 0 and redis.call('HMGET', KEYS[1], unpack(ids)) or {}
for i = 1, sessions do
  local id, epoch, committed, history, draft_ms, per_level, of = unpack(told[i])
  -- "epoch, outcomes of this window that were added, the window's first position, telemetry"
  local last, folded, window = string.match(known[i] or '', '^(%d+) (%d+) (%d+) ')
  local same = last == epoch
  folded, window = same and tonumber(folded) or 0, same and tonumber(window) or 0
  if not last and committed > WINDOW then
    folded = #history
  end
  if committed - window >= 2 * WINDOW then
    folded, window = 0, committed - WINDOW
  end
  if of > 0 and committed - window <= WINDOW and #history > folded then
    fold(of, string.sub(history, folded + 1), draft_ms, per_level)
    folded = #history
  end
  written[#written + 1] = id
  written[#written + 1] = string.format('%s %.0f %.0f ', epoch, folded, window) .. ARGV[5 + i]
end
if sessions > 0 then
  redis.call('HSET', KEYS[1], unpack(written))
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
-- A workload key that is hardly known, as where every request has a class of its own, is kept for a twenty-fourth of
-- the time.
for number, prior in pairs(priors) do
  redis.call('HSET', KEYS[1 + number], 'acceptance_history', prior[1],
    'draft_ms', string.format('%.9g', prior[2]), 'nodes_per_level', string.format('%.9g', prior[3]))
  redis.call('PEXPIRE', KEYS[1 + number], #prior[1] < KEPT and math.floor(ARGV[4] / 24) or ARGV[4])
end
return sessions
