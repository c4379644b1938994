-- Keep what a verifier reports about sessions, and add the outcomes of their devices' proposals to the priors.
--
-- A report of an older epoch never replaces that of a greater one. The acceptance history of a session is added to the
-- prior of its workload key: a report holds the last outcomes, of which those beyond the number that was added already
-- are new (a proposal that arrived late may insert one in between; then a neighbour counts for it). Of a session with
-- more positions than a report holds, only whole windows of positions are added. Of a session that has gone on for long
-- while nothing was kept of it, the outcomes may have been added already, and are left out.
--
-- KEYS: telemetry:<session> HASH, closed:<session> STRING and prior:<workload key> HASH, for each session
-- ARGV: 1 verifier id, 2 ms to keep the telemetry, 3 most positions of a report's history, 4 most outcomes of a workload
--       key, 5 ms to keep them, then 6 for each session: epoch (20 digits, so that text compares as numbers do),
--       telemetry, committed, acceptance history (one digit each, the last one the newest; '' if the session has no
--       workload key), draft ms, nodes per level
local HEAD, EACH = 5, 6
local WINDOW, KEPT = tonumber(ARGV[3]), tonumber(ARGV[4])

-- A known value moves by 5% at most with each report that brings outcomes: no single device moves it far. 0 is unknown.
local function follow(known, reported)
  known, reported = tonumber(known or '0'), tonumber(reported)
  if reported <= 0 or known <= 0 then return string.format('%.9g', math.max(known, reported)) end
  return string.format('%.9g', math.max(known / 1.05, math.min(known * 1.05, reported)))
end

-- A workload key that is hardly known, as where every request has a class of its own, is kept for a twenty-fourth of
-- the time.
local function fold(key, fresh, draft_ms, per_level)
  local known = redis.call('HMGET', key, 'acceptance_history', 'draft_ms', 'nodes_per_level')
  local history = string.sub((known[1] or '') .. fresh, -KEPT)
  redis.call('HSET', key, 'acceptance_history', history,
    'draft_ms', follow(known[2], draft_ms), 'nodes_per_level', follow(known[3], per_level))
  redis.call('PEXPIRE', key, #history < KEPT and math.floor(ARGV[5] / 24) or ARGV[5])
end

for i = 1, #KEYS / 3 do
  local record, closed, prior = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
  local at = HEAD + EACH * (i - 1)
  local epoch, telemetry, committed, history, draft_ms, per_level = unpack(ARGV, at + 1, at + EACH)
  local known = redis.call('HMGET', record, 'epoch', 'folded', 'window')
  if redis.call('EXISTS', closed) == 0 and (not known[1] or known[1] <= epoch) then
    local same = known[1] == epoch
    local folded = same and tonumber(known[2] or '0') or 0 -- outcomes of this window that were added
    local window = same and tonumber(known[3] or '0') or 0 -- the window's first position
    committed = tonumber(committed)
    if not known[1] and committed > WINDOW then
      folded = #history
    end
    if committed - window >= 2 * WINDOW then
      folded, window = 0, committed - WINDOW
    end
    if committed - window <= WINDOW and #history > folded then
      fold(prior, string.sub(history, folded + 1), draft_ms, per_level)
      folded = #history
    end
    redis.call('HSET', record, 'verifier', ARGV[1], 'epoch', epoch, 'telemetry', telemetry,
      'folded', folded, 'window', string.format('%.0f', window))
    redis.call('PEXPIRE', record, ARGV[2])
  end
end
return #KEYS / 3
