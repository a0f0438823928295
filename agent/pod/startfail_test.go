package pod

import (
	"errors"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/internal/virtual"
)

// F126: a container with a command that cannot be executed ends with StartError, both times and the
// runtime's message. The restart policy decides about a restart.
func TestCommandThatCannotBeExecuted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		failure := errors.New(`exec: "nosuch": executable file not found in $PATH`)
		n.rt.Fail("StartContainer", failure)
		p := simplePod("never")
		p.Spec.RestartPolicy = v1.RestartPolicyNever
		n.cluster.Put(p)
		virtual.Wait()
		time.Sleep(time.Minute)
		n.expectStatus("never", `Failed 10.88.0.2 Initialized; app ended: StartError 128`)
		end := n.reportedPod("never").Status.ContainerStatuses[0].State.Terminated
		if end.StartedAt.IsZero() || end.FinishedAt.IsZero() || end.Message != failure.Error() ||
			end.ContainerID == "" {
			t.Errorf("ended as %+v", end)
		}
		n.expectEvents("never", `Failed Error: exec: "nosuch"`)
		n.rt.Fail("StartContainer", failure, failure, failure)
		n.cluster.Put(simplePod("always"))
		virtual.Wait()
		time.Sleep(2500 * time.Millisecond)
		virtual.Wait()
		cs := n.reportedPod("always").Status.ContainerStatuses[0]
		if w := cs.State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" ||
			cs.LastTerminationState.Terminated == nil ||
			cs.LastTerminationState.Terminated.Reason != "StartError" || cs.RestartCount == 0 {
			t.Errorf("between two starts: %+v", cs)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if cs := n.reportedPod("always").Status.ContainerStatuses[0]; cs.State.Running == nil || cs.RestartCount != 3 {
			t.Errorf("when the command can be executed: %+v", cs)
		}
	})
}
