package soak

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
)

var idle = flag.Duration("soak.idle", 0,
	"let a cluster rest for so long, at its own pace; 0 = some seconds in which much more happens than in hours")

const (
	// rssSlack is the accepted growth of the resident memory: the heap is as large as the garbage
	// collector lets it become.
	rssSlack = 64 << 20
	// hurried is for how long, and how often, everything happens in the short form.
	hurried      = 12 * time.Second
	hurriedBeat  = 200 * time.Millisecond
	hurriedPoll  = 20 * time.Millisecond
	ordinaryPoll = 15 * time.Second
)

// A cluster of three replicas in which nothing changes keeps its memory, and writes nothing, while its nodes say that they
// live and its operators' programs look at it.
func TestIdleClusterKeepsItsMemory(t *testing.T) {
	total, poll, of := *idle, ordinaryPoll, clusterShape{replicas: 3, nodes: 8}
	if total == 0 {
		total, poll, of.heartbeat, of.nodes = hurried, hurriedPoll, hurriedBeat, 24
	}
	cs := startCluster(t, of)
	startInformers(t, cs)
	createRunningPods(t, cs, 50)
	looked := 0
	seen := func(d time.Duration) (bytes, rss uint64) {
		looks, failed := watchIdle(t, cs, d, poll)
		looked += looks
		rss = residentMemory(t)
		bytes, _ = liveHeap(t, fmt.Sprintf("another %v, %d looks, %d unanswered, %.1f MiB resident", d, looks,
			failed, toMiB(rss)))
		return bytes, rss
	}
	warm := min(total/6, 2*time.Minute)
	before, rss := seen(warm)
	writeProfile(t, "idle-before")
	var after, then uint64
	wrote := func() (writes, looks int) {
		revision, began := settledRevision(t, cs), looked
		for left := total - warm; left > 0; left -= 5 * time.Minute {
			after, then = seen(min(left, 5*time.Minute))
		}
		return settledRevision(t, cs) - revision, looked - began
	}
	// On a very busy machine replicas and nodes lose each other briefly, which causes writes:
	// measure again. Writes caused by time or by clients occur in each measurement.
	writes, looks := wrote()
	for again := 0; again < 3 && *idle == 0 && 4*writes > looks; again++ {
		t.Logf("%d looks, and the store took %d writes", looks, writes)
		writes, looks = wrote()
	}
	writeProfile(t, "idle-after")
	if after > before+slack {
		t.Errorf("the live heap grew from %.1f to %.1f MiB within %v in which nothing happened", toMiB(before),
			toMiB(after), total-warm)
	}
	if then > rss+rssSlack {
		t.Errorf("the process grew from %.1f to %.1f MiB within %v in which nothing happened", toMiB(rss),
			toMiB(then), total-warm)
	}
	if 4*writes > looks {
		t.Errorf("nothing happened but %d looks, and the store took %d writes", looks, writes)
	}
}

// createRunningPods creates a Deployment and waits until its pods run.
func createRunningPods(t *testing.T, cs kubernetes.Interface, pods int32) {
	t.Helper()
	ctx, labels := context.Background(), map[string]string{"app": "rests"}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "rests"}, Spec: appsv1.DeploymentSpec{
		Replicas: &pods, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "hello"}}}},
	}}
	if _, err := cs.AppsV1().Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pods", func() error {
		d, err := cs.AppsV1().Deployments("default").Get(ctx, "rests", metav1.GetOptions{})
		if err == nil && d.Status.ReadyReplicas < pods {
			err = fmt.Errorf("%d ready", d.Status.ReadyReplicas)
		}
		return err
	})
}

// watchIdle lets the cluster run for a time d while clients poll it, and then checks that all nodes
// have sent heartbeats. It fails if fewer than nine of ten polls succeed.
func watchIdle(t *testing.T, cs *kubernetes.Clientset, d, poll time.Duration) (looks, failed int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	for {
		looks++
		for _, path := range []string{
			"/metrics", "/readyz", "/cluster/status", "/api/v1/nodes", "/api/v1/pods",
			"/apis/coordination.k8s.io/v1/leases",
			api.PathTimeline + "/apis/apps/v1/namespaces/default/deployments/rests",
		} {
			if _, err := cs.RESTClient().Get().AbsPath(path).DoRaw(ctx); err != nil && ctx.Err() == nil {
				t.Logf("look %d: %s: %v", looks, path, err)
				failed++
				break
			}
		}
		if wait.Delay(ctx, poll) != nil {
			break
		}
	}
	if 10*failed > looks {
		t.Errorf("%d of %d looks were not answered", failed, looks)
	}
	leases, err := cs.CoordinationV1().Leases(v1.NamespaceNodeLease).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases.Items {
		if l.Spec.RenewTime == nil || time.Since(l.Spec.RenewTime.Time) > 30*time.Second {
			t.Errorf("node %s sent its last heartbeat at %v", l.Name, l.Spec.RenewTime)
		}
	}
	return looks, failed
}

// settledRevision returns the store's revision when it has not changed for a second.
func settledRevision(t *testing.T, cs kubernetes.Interface) (revision int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := wait.For(ctx, time.Second, func() error {
		list, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		now, err := strconv.Atoi(list.ResourceVersion)
		if err == nil && now != revision {
			revision, err = now, errors.New("something is written still")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

// residentMemory returns the resident memory of this process in bytes.
func residentMemory(t *testing.T) uint64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(status) {
		if f := bytes.Fields(line); len(f) == 3 && string(f[0]) == "VmRSS:" {
			kib, err := strconv.ParseUint(string(f[1]), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmRSS in /proc/self/status")
	return 0
}
