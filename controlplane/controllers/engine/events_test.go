package engine

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

// The recorder is started once, with the first event. Without events it is never started, and
// events after the shutdown do not start it.
func TestRecorderBeginsWithTheFirstEvent(t *testing.T) {
	begun, stopped, fake := 0, 0, record.NewFakeRecorder(4)
	make := func() *lazyRecorder {
		return &lazyRecorder{start: func() (record.EventRecorder, func()) {
			begun++
			return fake, func() { stopped++ }
		}}
	}
	silent := make()
	silent.shutdownRecorder()
	silent.Event(&corev1.Pod{}, corev1.EventTypeNormal, "Late", "too late")
	if begun != 0 || stopped != 0 {
		t.Errorf("without an event %d were begun and %d stopped", begun, stopped)
	}
	r := make()
	r.Event(&corev1.Pod{}, corev1.EventTypeNormal, "First", "one")
	r.Eventf(&corev1.Pod{}, corev1.EventTypeNormal, "Second", "%d", 2)
	r.AnnotatedEventf(&corev1.Pod{}, nil, corev1.EventTypeNormal, "Third", "%d", 3)
	r.shutdownRecorder()
	r.shutdownRecorder()
	if begun != 1 || stopped != 1 {
		t.Errorf("%d were begun and %d stopped, want one of each", begun, stopped)
	}
	for _, want := range []string{"Normal First one", "Normal Second 2", "Normal Third 3"} {
		if got := <-fake.Events; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
