package podtable_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec/podtable"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func waiting(reason string) corev1.ContainerStatus {
	return corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}
}

func terminated(reason string, code, signal int32) corev1.ContainerStatus {
	return corev1.ContainerStatus{State: corev1.ContainerState{
		Terminated: &corev1.ContainerStateTerminated{Reason: reason, ExitCode: code, Signal: signal}}}
}

func running(ready bool) corev1.ContainerStatus {
	started := true
	return corev1.ContainerStatus{Ready: ready, Started: &started,
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
}

func restarted(c corev1.ContainerStatus, n int32, last time.Duration) corev1.ContainerStatus {
	c.RestartCount = n
	c.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{FinishedAt: kindstest.Ago(last)}
	return c
}

// show returns the table cells of a pod with this phase, these init containers (the one named
// "sidecar" is restartable) and these containers.
func show(phase corev1.PodPhase, inits, containers []corev1.ContainerStatus, change ...func(*corev1.Pod)) string {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", CreationTimestamp: kindstest.Ago(90 * time.Second)}}
	p.Status.Phase = phase
	add := func(list []corev1.ContainerStatus, prefix string) (specs []corev1.Container, out []corev1.ContainerStatus) {
		for i, c := range list {
			if c.Name == "" {
				c.Name = fmt.Sprintf("%s%d", prefix, i)
			}
			spec := corev1.Container{Name: c.Name}
			if c.Name == "sidecar" {
				always := corev1.ContainerRestartPolicyAlways
				spec.RestartPolicy = &always
			}
			specs, out = append(specs, spec), append(out, c)
		}
		return specs, out
	}
	p.Spec.InitContainers, p.Status.InitContainerStatuses = add(inits, "i")
	p.Spec.Containers, p.Status.ContainerStatuses = add(containers, "c")
	for _, f := range change {
		f(p)
	}
	row := podtable.Row(p, kindstest.Now)
	var cells []string
	for _, c := range row[1:4] {
		cells = append(cells, fmt.Sprint(c))
	}
	return strings.Join(cells, " | ")
}

// F18, F111: what STATUS says in every state of a pod.
func TestPodStatusColumn(t *testing.T) {
	type list = []corev1.ContainerStatus
	deleted := func(p *corev1.Pod) { d := kindstest.Ago(time.Second); p.DeletionTimestamp = &d }
	condition := func(c corev1.PodConditionType, s corev1.ConditionStatus, reason string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: c, Status: s, Reason: reason})
		}
	}
	reason := func(r string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Status.Reason = r } }
	sidecar := func(c corev1.ContainerStatus) corev1.ContainerStatus { c.Name = "sidecar"; return c }
	for _, c := range []struct{ name, got, want string }{
		{"unscheduled", show("Pending", nil, nil, func(p *corev1.Pod) {
			p.Spec.Containers = make([]corev1.Container, 2)
		}), "0/2 | Pending | 0"},
		{"gated", show("Pending", nil, nil, condition("PodScheduled", "False", "SchedulingGated")),
			"0/0 | SchedulingGated | 0"},
		{"creating", show("Pending", nil, list{waiting("ContainerCreating")}), "0/1 | ContainerCreating | 0"},
		{"running", show("Running", nil, list{running(true)}), "1/1 | Running | 0"},
		{"not ready", show("Running", nil, list{running(false), running(true)}), "1/2 | Running | 0"},
		{"restarted", show("Running", nil, list{restarted(running(true), 3, 5*time.Minute)}),
			"1/1 | Running | 3 (5m ago)"},
		{"latest restart counts", show("Running", nil,
			list{restarted(running(true), 1, time.Hour), restarted(running(true), 1, 2*time.Minute)}),
			"2/2 | Running | 2 (2m ago)"},
		{"crash loop", show("Running", nil, list{restarted(waiting("CrashLoopBackOff"), 4, 30*time.Second)}),
			"0/1 | CrashLoopBackOff | 4 (30s ago)"},
		{"image", show("Pending", nil, list{waiting("ImagePullBackOff")}), "0/1 | ImagePullBackOff | 0"},
		{"first reason wins", show("Pending", nil, list{waiting("ErrImagePull"), waiting("ContainerCreating")}),
			"0/2 | ErrImagePull | 0"},
		{"out of memory", show("Failed", nil, list{terminated("OOMKilled", 137, 0)}), "0/1 | OOMKilled | 0"},
		{"completed", show("Succeeded", nil, list{terminated("Completed", 0, 0)}), "0/1 | Completed | 0"},
		{"error", show("Failed", nil, list{terminated("Error", 1, 0)}), "0/1 | Error | 0"},
		{"exit code", show("Failed", nil, list{terminated("", 3, 0)}), "0/1 | ExitCode:3 | 0"},
		{"signal", show("Failed", nil, list{terminated("", 0, 9)}), "0/1 | Signal:9 | 0"},
		{"evicted", show("Failed", nil, nil, reason("Evicted")), "0/0 | Evicted | 0"},
		{"one done, one ready", show("Running", nil, list{terminated("Completed", 0, 0), running(true)},
			condition("Ready", "True", "")), "1/2 | Running | 0"},
		{"one done, pod not ready", show("Running", nil, list{terminated("Completed", 0, 0), running(true)}),
			"1/2 | NotReady | 0"},
		{"init waits", show("Pending", list{waiting("PodInitializing"), waiting("")}, list{waiting("PodInitializing")}),
			"0/1 | Init:0/2 | 0"},
		{"second init", show("Pending", list{terminated("Completed", 0, 0), running(false)},
			list{waiting("PodInitializing")}), "0/1 | Init:1/2 | 0"},
		{"init loops", show("Pending", list{restarted(waiting("CrashLoopBackOff"), 2, time.Minute)},
			list{waiting("PodInitializing")}), "0/1 | Init:CrashLoopBackOff | 2 (60s ago)"},
		{"init failed", show("Pending", list{terminated("", 5, 0)}, list{waiting("PodInitializing")}),
			"0/1 | Init:ExitCode:5 | 0"},
		{"init killed", show("Pending", list{terminated("", 137, 9)}, list{waiting("PodInitializing")}),
			"0/1 | Init:Signal:9 | 0"},
		{"init error", show("Pending", list{terminated("Error", 1, 0)}, list{waiting("PodInitializing")}),
			"0/1 | Init:Error | 0"},
		{"inits done", show("Running", list{terminated("Completed", 0, 0)}, list{running(true)}), "1/1 | Running | 0"},
		{"restarts of init forgotten", show("Running", list{restarted(terminated("Completed", 0, 0), 2, time.Minute)},
			list{running(true)}), "1/1 | Running | 0"},
		{"sidecar starting", show("Pending", list{sidecar(waiting("PodInitializing"))},
			list{waiting("PodInitializing")}), "0/2 | Init:0/1 | 0"},
		{"sidecar up", show("Running", list{sidecar(restarted(running(true), 1, time.Minute))}, list{running(true)}),
			"2/2 | Running | 1 (60s ago)"},
		{"terminating", show("Running", nil, list{running(true)}, deleted), "1/1 | Terminating | 0"},
		{"deleted when done", show("Succeeded", nil, list{terminated("Completed", 0, 0)}, deleted),
			"0/1 | Completed | 0"},
		{"node lost", show("Running", nil, list{running(true)}, deleted, reason("NodeLost")), "1/1 | Unknown | 0"},
	} {
		if c.got != c.want {
			t.Errorf("%s: %s, want %s", c.name, c.got, c.want)
		}
	}
}

func TestPodWideColumns(t *testing.T) {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", CreationTimestamp: kindstest.Ago(90 * time.Second)}}
	if got := fmt.Sprint(podtable.Row(p, kindstest.Now)[4:]); got != "[90s <none> <none> <none> <none>]" {
		t.Error(got)
	}
	p.Spec.NodeName, p.Status.PodIPs = "w1", []corev1.PodIP{{IP: "10.244.1.5"}}
	p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "a"}, {ConditionType: "b"}}
	p.Status.Conditions = []corev1.PodCondition{{Type: "a", Status: "True"}}
	if got := fmt.Sprint(podtable.Row(p, kindstest.Now)[4:]); got != "[90s 10.244.1.5 w1 <none> 1/2]" {
		t.Error(got)
	}
}
