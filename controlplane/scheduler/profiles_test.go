package scheduler_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/controlplane/scheduler/config"
)

// settings are those of a file that has these lines below its kind.
func settings(t testing.TB, lines string) *config.Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	text := "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n" + lines
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := scheduler.LoadConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func forScheduler(name string) func(*v1.Pod) {
	return func(pod *v1.Pod) { pod.Spec.SchedulerName = name }
}

const packed = `
profiles:
- {}
- schedulerName: packed
  plugins: {score: {disabled: [{name: '*'}], enabled: [{name: NodeResourcesFit, weight: 2}]}}
  pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: MostAllocated}}}]
`

// Each pod is placed by the profile that it names; one that names none of them is left alone, and its node is taken note
// of when another scheduler binds it.
func TestProfiles(t *testing.T) {
	b := newBedOf(t, scheduler.Config{Settings: settings(t, packed)})
	b.node("half", "4")
	b.pod("first", "2")
	b.lead()
	b.awaitNode("first", "half")
	b.node("empty", "4")
	b.pod("stranger", "1", forScheduler("theirs"))
	b.pod("spread", "1")
	b.awaitNode("spread", "empty")
	b.pod("tight", "1", forScheduler("packed"))
	b.awaitNode("tight", "half")
	b.eventually("the event of the packed profile", func() error { return b.eventBy("tight", "packed") })
	b.eventually("the event of the default profile", func() error { return b.eventBy("spread", "default-scheduler") })
	pod := b.get("stranger")
	if pod.Spec.NodeName != "" || len(pod.Status.Conditions) > 0 || len(b.events("stranger")) > 0 {
		t.Errorf("another scheduler's pod was touched: %+v, events %q", pod.Status, b.events("stranger"))
	}
}

// A file that cannot be is refused when it is loaded, not when the first pod comes.
func TestLoadConfigRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	for text, want := range map[string]string{
		"profiles: [{plugins: {score: {enabled: [{name: Foo}]}}}]": `scheduler.yaml: ` +
			`profiles[0].plugins.score.enabled[0].name: plugin "Foo" does not exist`,
		"profiles: [{}, {schedulerName: b, plugins: {queueSort: {disabled: [{name: '*'}]}}}]": "profiles[1].plugins: " +
			"scheduler: no plugin sorts the queue",
	} {
		if err := os.WriteFile(path, []byte(head+text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := scheduler.LoadConfig(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
