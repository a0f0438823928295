package api

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestIsPodTerminal(t *testing.T) {
	for phase, want := range map[corev1.PodPhase]bool{
		"": false, corev1.PodPending: false, corev1.PodRunning: false, corev1.PodUnknown: false,
		corev1.PodSucceeded: true, corev1.PodFailed: true,
	} {
		if got := IsPodTerminal(&corev1.Pod{Status: corev1.PodStatus{Phase: phase}}); got != want {
			t.Errorf("a pod of phase %q: terminal %t, want %t", phase, got, want)
		}
	}
}

func TestConditions(t *testing.T) {
	for _, status := range []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse,
		corev1.ConditionUnknown} {
		pod := &corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: status}}}}
		node := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: status}}}}
		if got := IsPodReady(pod); got != (status == corev1.ConditionTrue) {
			t.Errorf("a pod with Ready %s: ready %t", status, got)
		}
		if PodCondition(pod, corev1.PodReady) != &pod.Status.Conditions[1] {
			t.Errorf("PodCondition returned another condition than Ready")
		}
		if got := IsNodeReady(node); got != (status == corev1.ConditionTrue) {
			t.Errorf("a node with Ready %s: ready %t", status, got)
		}
		if got := NodeReadyStatus(node); got != status {
			t.Errorf("a node with Ready %s: status %q", status, got)
		}
	}
	if IsPodReady(&corev1.Pod{}) || PodCondition(&corev1.Pod{}, corev1.PodReady) != nil {
		t.Error("a pod without conditions is Ready")
	}
	if IsNodeReady(&corev1.Node{}) || NodeReadyStatus(&corev1.Node{}) != "" {
		t.Error("a node without conditions is Ready")
	}
}
