package why

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

var rewrite = flag.Bool("rewrite", false, "overwrite the transcripts in testdata with the current output")

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

// subject is one question of a transcript.
type subject struct {
	about string
	world World
	of    runtime.Object
}

// transcript compares what is said of each subject with testdata/NAME.txt.
func transcript(t *testing.T, file string, subjects []subject) {
	t.Helper()
	var b strings.Builder
	for _, s := range subjects {
		s.world.Now = now
		r := Explain(&s.world, s.of)
		b.WriteString("# " + s.about + "\n")
		if err := r.Print(&b, now); err != nil {
			t.Fatal(err)
		}
		b.WriteByte('\n')
	}
	path := filepath.Join("testdata", file+".txt")
	if *rewrite {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != string(want) {
		t.Errorf("%s differs (go test ./kctl/why -rewrite):\n%s", path, got)
	}
}

func quantities(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

func pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name),
			CreationTimestamp: ago(5 * time.Minute),
			Labels:            map[string]string{"app": "web", "pod-template-hash": "abc"}},
		Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "registry.local/web:1"}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	yes := true
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-abc", UID: "rs",
		Controller: &yes}}
	for _, c := range change {
		c(p)
	}
	return p
}

func alone(p *corev1.Pod) { p.OwnerReferences, p.Labels = nil, nil }

func asks(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = quantities(pairs...) }
}

func podLevel(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Resources = &corev1.ResourceRequirements{Requests: quantities(pairs...)} }
}

func unfit(message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions = append(p.Status.Conditions,
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
				Reason: "Unschedulable", Message: message, LastTransitionTime: ago(4 * time.Minute)})
	}
}

func on(node string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.NodeName = node
		start := ago(4 * time.Minute)
		p.Status.StartTime = &start
	}
}

func ready(status corev1.ConditionStatus) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Phase = corev1.PodRunning
		p.Status.Conditions = append(p.Status.Conditions,
			corev1.PodCondition{Type: corev1.PodReady, Status: status, LastTransitionTime: ago(5 * time.Minute)})
	}
}

func node(name string, change ...func(*corev1.Node)) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name),
		Labels: map[string]string{"kubernetes.io/hostname": name}},
		Status: corev1.NodeStatus{Allocatable: quantities("cpu", "2", "memory", "4Gi", "pods", "110"),
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
				LastTransitionTime: ago(time.Hour)}}}}
	for _, c := range change {
		c(&n)
	}
	return n
}

func said(p *corev1.Pod, reason, message string, before time.Duration, container ...string) corev1.Event {
	e := corev1.Event{InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: p.Name,
		Namespace: p.Namespace, UID: p.UID},
		Reason: reason, Message: message, LastTimestamp: ago(before), Type: corev1.EventTypeWarning}
	for _, c := range container {
		e.InvolvedObject.FieldPath = "spec.containers{" + c + "}"
	}
	return e
}

// What a person pastes into a shell says no more than it seems to, whatever a message or a name holds.
func TestCommandsArePlainWords(t *testing.T) {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}}
	for _, message := range []string{
		`configmap "x; rm -rf $HOME" not found`, "secret \"`id`\" not found", `persistentvolumeclaim "$(id)" not found`,
		"couldn't find key k in ConfigMap ", "couldn't find key $(id) in Secret default/$(id)",
		`secret "a` + "\n" + `id" not found`,
	} {
		for _, command := range missingObjectCommands(p, message) {
			if strings.ContainsAny(command, "$`;\n|&<>") {
				t.Errorf("%q: %q", message, command)
			}
		}
	}
}
