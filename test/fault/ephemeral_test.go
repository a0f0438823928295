package fault

import (
	"context"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/test/testenv"
)

// F128 P9: kill -9 of an agent touches no ephemeral container. One that has ended is not started
// again.
func TestDebugContainersOutliveTheirAgent(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.Client(t)
	createPod(t, cs, ns, sleeperPod("p", "w1"))
	awaitPod(t, cs, ns, "p", requireRunning)
	for name, script := range map[string]string{"runs": "exec sleep 1000000", "ended": "exit 3"} {
		testenv.Kctl(t, "-n", ns, "debug", "p", "-c", name, "--image=keelson.dev/tools:v1", "--target=main",
			"--profile=general", "--attach=false", "--", "sh", "-c", script)
	}
	before := awaitPod(t, cs, ns, "p", func(p *v1.Pod) error {
		states := map[string]v1.ContainerState{}
		for _, s := range p.Status.EphemeralContainerStatuses {
			states[s.Name] = s.State
		}
		if end := states["ended"].Terminated; states["runs"].Running == nil || end == nil || end.ExitCode != 3 {
			return fmt.Errorf("ephemeral containers: %+v", states)
		}
		return nil
	})
	if err := testenv.Lab().KillDaemon(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Lab().Restart(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	awaitNodes(t, cs, map[string]v1.ConditionStatus{"w1": v1.ConditionTrue})
	// A container that is added now shows that the agent has handled the pod since its restart.
	testenv.Kctl(t, "-n", ns, "debug", "p", "-c", "later", "--image=keelson.dev/tools:v1", "--attach=false",
		"--profile=general", "--", "sleep", "1000000")
	after := awaitPod(t, cs, ns, "p", func(p *v1.Pod) error {
		for _, s := range p.Status.EphemeralContainerStatuses {
			if s.Name == "later" && s.State.Running != nil {
				return requireRunning(p)
			}
		}
		return fmt.Errorf("ephemeral containers: %+v", p.Status.EphemeralContainerStatuses)
	})
	for i, was := range before.Status.EphemeralContainerStatuses {
		if now := after.Status.EphemeralContainerStatuses[i]; now.ContainerID != was.ContainerID ||
			(now.State.Running == nil) != (was.State.Running == nil) {
			t.Errorf("ephemeral container %s has changed: %+v, before %+v", was.Name, now, was)
		}
	}
}
