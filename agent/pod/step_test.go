package pod

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/agent/pod/lifecycle"
)

var rewrite = flag.Bool("rewrite", false, "write the transcripts instead of comparing them")

// TestTranscripts runs scripts against Step and Status. A file contains a pod, the script and the
// transcript: the plan of Step after "> command" and the status after "=".
//
// F94 (restart policies), F101 (sandbox lost), F111 (states in order), F112 (startup gate), F113,
// F114, F115, P9, P15, P20, P23
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/step/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no transcripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			head, want, _ := strings.Cut(string(b), "-- transcript --\n")
			manifest, script, ok := strings.Cut(head, "-- script --\n")
			if !ok {
				t.Fatal("no script")
			}
			got := playScript(t, manifest, script)
			if *rewrite {
				if err := os.WriteFile(file, []byte(head+"-- transcript --\n"+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != want {
				t.Errorf("transcript differs; run with -rewrite and read the diff. got:\n%s", got)
			}
		})
	}
}

func playScript(t *testing.T, manifest, script string) string {
	pod := &v1.Pod{}
	if err := yaml.UnmarshalStrict([]byte(manifest), pod); err != nil {
		t.Fatal(err)
	}
	pod.Name, pod.Namespace, pod.UID, pod.Generation = "web", "default", "u1", 1
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Image == "" {
			pod.Spec.Containers[i].Image = "hello:1"
		}
	}
	for i := range pod.Spec.InitContainers {
		pod.Spec.InitContainers[i].Image = "tools:1"
	}
	x := newWorld(t, pod)
	x.showState()
	for line := range strings.Lines(script) {
		line = strings.TrimSpace(line)
		switch {
		case line == "", strings.HasPrefix(line, "#"):
			continue
		case line == "auto":
			x.completeAll()
			continue
		}
		x.logf("> %s\n", line)
		x.runCommand(line)
		x.showState()
	}
	return x.log.String()
}

// After a power failure only the record of a container's end is left: the container is not run
// again.
func TestAnEndWithoutASandboxCounts(t *testing.T) {
	for policy, want := range map[v1.RestartPolicy]string{v1.RestartPolicyNever: "unmount-volumes",
		v1.RestartPolicyAlways: "create-sandbox #0"} {
		p := simplePod("u1")
		p.Spec.RestartPolicy = policy
		x := newWorld(t, p)
		x.observed().Containers = []lifecycle.Container{{ID: "c1", Sandbox: "gone", Name: "app",
			State: lifecycle.Exited, ExitCode: 0, Times: lifecycle.InstanceTimes{Started: epoch, Finished: epoch},
			Attempt: 3, Hash: lifecycle.SpecHash(&p.Spec.Containers[0]), Delay: lifecycle.NoDelay}}
		plan := x.planActions()
		var actions []string
		for _, a := range plan.Actions {
			actions = append(actions, a.String())
		}
		if !slices.Contains(actions, want) {
			t.Errorf("%s: %q", policy, actions)
		}
		if succeeded := x.worker.status.last.Phase == v1.PodSucceeded; succeeded != (policy == v1.RestartPolicyNever) {
			t.Errorf("%s: the pod is %s", policy, x.worker.status.last.Phase)
		}
	}
}
