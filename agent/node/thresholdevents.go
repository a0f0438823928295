package node

import (
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
)

// thresholdEvents reports events about the node when the level of an eviction signal is below its
// threshold.
type thresholdEvents struct {
	node     string
	reporter agent.Reporter
	reported map[eviction.Signal]time.Time // time of the last event, by signal
}

func newThresholdEvents(node string, to agent.Reporter) thresholdEvents {
	return thresholdEvents{node: node, reporter: to, reported: map[eviction.Signal]time.Time{}}
}

// reportThreshold reports the kubelet's event EvictionThresholdMet if the level of the signal s is
// below its threshold. It reports the event at most once per eventInterval.
func (t *thresholdEvents) reportThreshold(s eviction.Signal, r eviction.Reading) {
	if !r.Levels[s].IsShort() {
		return
	}
	if last, ok := t.reported[s]; ok && r.At.Sub(last) < eventInterval {
		return
	}
	t.reported[s] = r.At
	t.reporter.Event(nodeEvent(t.node, v1.EventTypeWarning, "EvictionThresholdMet",
		fmt.Sprintf("Attempting to reclaim %s", s.Resource()), r.At))
}
