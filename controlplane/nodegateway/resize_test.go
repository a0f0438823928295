package nodegateway

import (
	"testing"

	v1 "k8s.io/api/core/v1"
)

// A resize condition that the node no longer reports is removed, unlike conditions of other
// writers.
func TestConditionsOfAResizeGo(t *testing.T) {
	stored := &v1.PodStatus{Conditions: []v1.PodCondition{{Type: v1.PodResizePending, Status: v1.ConditionTrue, Reason: v1.PodReasonDeferred},
		{Type: v1.PodResizeInProgress, Status: v1.ConditionTrue}, {Type: "example.com/gate", Status: v1.ConditionTrue}}}
	reported := &v1.PodStatus{Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}}
	got := mergePodStatus(stored, reported).Conditions
	if len(got) != 2 || got[0].Type != v1.PodReady || got[1].Type != "example.com/gate" {
		t.Errorf("%+v", got)
	}
	reported.Conditions = append(reported.Conditions, stored.Conditions[1])
	if got = mergePodStatus(stored, reported).Conditions; len(got) != 3 || got[1].Type != v1.PodResizeInProgress {
		t.Errorf("%+v", got)
	}
}
