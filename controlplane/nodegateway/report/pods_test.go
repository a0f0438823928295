package report

import (
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The node's conditions replace stored ones, other conditions stay, and a final phase is never
// left.
func TestMergePodStatus(t *testing.T) {
	long := metav1.NewTime(time.Unix(1000, 0))
	stored := &v1.PodStatus{Phase: v1.PodFailed, Reason: "Evicted", QOSClass: v1.PodQOSBurstable,
		Conditions: []v1.PodCondition{
			{Type: v1.PodScheduled, Status: v1.ConditionTrue, LastTransitionTime: long},
			{Type: v1.PodReady, Status: v1.ConditionFalse, LastTransitionTime: long},
			{Type: "example.com/gate", Status: v1.ConditionTrue},
		}}
	got := mergePodStatus(stored, &v1.PodStatus{Phase: v1.PodRunning, Conditions: []v1.PodCondition{
		{Type: v1.PodScheduled, Status: v1.ConditionFalse},
		{Type: v1.PodReady, Status: v1.ConditionFalse, Reason: "ContainersNotReady", LastTransitionTime: metav1.Now()},
	}})
	if got.Phase != v1.PodFailed || got.Reason != "Evicted" || got.QOSClass != v1.PodQOSBurstable {
		t.Errorf("phase %s, reason %s, class %s", got.Phase, got.Reason, got.QOSClass)
	}
	want := []v1.PodCondition{stored.Conditions[0],
		{Type: v1.PodReady, Status: v1.ConditionFalse, Reason: "ContainersNotReady", LastTransitionTime: long},
		stored.Conditions[2]}
	if !slices.Equal(got.Conditions, want) {
		t.Errorf("conditions %+v, want %+v", got.Conditions, want)
	}
}

// F32: an overlong message of a waiting container, as earlier agents send it, is truncated so that
// the status can be stored. The reported status itself is not modified.
func TestWaitingMessagesAreTruncated(t *testing.T) {
	waits := func(bytes int) v1.ContainerStatus {
		return v1.ContainerStatus{Name: "c",
			State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "ErrImagePull",
				Message: strings.Repeat("x", bytes)}}}
	}
	said := &v1.PodStatus{Phase: v1.PodPending, InitContainerStatuses: []v1.ContainerStatus{waits(200 << 10)},
		ContainerStatuses: []v1.ContainerStatus{{Name: "runs"}, waits(maxWaitingMessage),
			waits(maxWaitingMessage + 1)},
		EphemeralContainerStatuses: []v1.ContainerStatus{waits(200 << 10)}}
	before := said.DeepCopy()
	got := mergePodStatus(&v1.PodStatus{}, said)
	for _, list := range [][]v1.ContainerStatus{got.InitContainerStatuses, got.ContainerStatuses[1:],
		got.EphemeralContainerStatuses} {
		for _, s := range list {
			if w := s.State.Waiting; len(w.Message) != maxWaitingMessage || w.Reason != "ErrImagePull" {
				t.Errorf("%s for %d bytes", w.Reason, len(w.Message))
			}
		}
	}
	if !equality.Semantic.DeepEqual(said, before) {
		t.Error("what was reported is changed")
	}
	if again := mergePodStatus(got, said); !equality.Semantic.DeepEqual(again, got) {
		t.Error("it would be written again")
	}
}

// A resize condition that the node no longer reports is removed, unlike conditions of other
// writers.
func TestResizeConditionsAreRemoved(t *testing.T) {
	stored := &v1.PodStatus{Conditions: []v1.PodCondition{{Type: v1.PodResizePending, Status: v1.ConditionTrue,
		Reason: v1.PodReasonDeferred},
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
