// Package soak runs a control plane in this process with simulated nodes and compares its memory
// before and after many pods. It also measures the resident memory of an idle replica's program.
package soak

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
)

var (
	pods     = flag.Int("soak.pods", 1000, "how many pods come and go between the two measurements, and as many before")
	profiles = flag.String("soak.profiles", "", "write the heap's profiles to this folder")
)

const (
	patience = 4 * time.Minute
	ofWave   = 200 // pods that run at once
	// historyAge replaces the minutes for which changes are kept for watches that resume.
	historyAge = time.Second
	// slack is the accepted difference of the heap: bounded buffers that are not quite full.
	slack = 8 << 20
)

func eventually(t *testing.T, what string, cond func() error) {
	t.Helper()
	await.Until(context.Background(), t, patience, 20*time.Millisecond, what, cond)
}

// liveHeap returns the bytes and the number of objects on the heap after a garbage collection.
func liveHeap(t *testing.T, what string) (bytes, objects uint64) {
	t.Helper()
	runtime.GC()
	runtime.GC() // also collects objects with finalizers
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	t.Logf("%s: %.1f MiB live in %d objects, %.1f MiB from the system", what, toMiB(m.HeapAlloc), m.HeapObjects,
		toMiB(m.Sys-m.HeapReleased))
	return m.HeapAlloc, m.HeapObjects
}

func toMiB(bytes uint64) float64 { return float64(bytes) / (1 << 20) }

// writeProfile writes a heap profile for "go tool pprof -inuse_space -base BEFORE AFTER".
func writeProfile(t *testing.T, name string) {
	t.Helper()
	if *profiles == "" {
		return
	}
	f, err := os.Create(filepath.Join(*profiles, name))
	if err == nil {
		err = errors.Join(pprof.Lookup("heap").WriteTo(f, 0), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// runWave creates a Deployment with this number of pods, waits until all run, and deletes it.
func runWave(t *testing.T, cs *kubernetes.Clientset, name string, pods int32) {
	t.Helper()
	ctx := context.Background()
	labels := map[string]string{"app": name}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
		Replicas: &pods, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "hello"}}}},
	}}
	if _, err := cs.AppsV1().Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, name, func() error {
		d, err := cs.AppsV1().Deployments("default").Get(ctx, name, metav1.GetOptions{})
		if err == nil && d.Status.ReadyReplicas < pods {
			err = fmt.Errorf("%d ready", d.Status.ReadyReplicas)
		}
		return err
	})
	if err := cs.AppsV1().Deployments("default").Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, name, func() error {
		list, err := cs.CoreV1().Pods("default").List(ctx, metav1.ListOptions{Limit: 1})
		if err == nil && len(list.Items) > 0 {
			err = errors.New("pods are left")
		}
		return err
	})
}

// startInformers watches like a client with a cache: kubectl, an operator, a dashboard.
func startInformers(t *testing.T, cs kubernetes.Interface) {
	t.Helper()
	f := informers.NewSharedInformerFactory(cs, 0)
	f.Core().V1().Pods().Informer()
	f.Core().V1().Events().Informer()
	f.Apps().V1().Deployments().Informer()
	f.Apps().V1().ReplicaSets().Informer()
	ctx, cancel := context.WithCancel(context.Background())
	f.Start(ctx.Done())
	f.WaitForCacheSync(ctx.Done())
	t.Cleanup(func() { cancel(); f.Shutdown() })
}

// churnPods creates and deletes this number of pods and their events.
func churnPods(t *testing.T, cs *kubernetes.Clientset, name string, pods int) {
	t.Helper()
	for i := 0; i*ofWave < pods; i++ {
		runWave(t, cs, fmt.Sprintf("%s-%d", name, i), ofWave)
	}
	if err := cs.CoreV1().Events("default").DeleteCollection(context.Background(), metav1.DeleteOptions{},
		metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
}

// Created and deleted objects leave nothing in a replica's memory: the heap after many pods is as
// large as after few. Bounded data (the newest log entries, the timeline) fills in the first waves.
func TestChurnLeavesNothingBehind(t *testing.T) {
	cs := startCluster(t, clusterShape{replicas: 1, nodes: 4, store: datadir.StoreOptions{HistoryAge: historyAge}})
	startInformers(t, cs)
	liveHeap(t, "a cluster of four nodes")
	churnPods(t, cs, "first", *pods)
	var before, objects uint64
	settled := func(what string) (bytes, objects uint64) {
		// History is forgotten by age: wait until it is.
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		last := uint64(math.MaxUint64)
		err := wait.For(ctx, historyAge, func() error {
			if bytes, objects = liveHeap(t, what); objects < last-last/100 {
				last = objects
				return errors.New("memory is still given back")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return bytes, objects
	}
	before, objects = settled(fmt.Sprintf("after %d pods", *pods))
	writeProfile(t, "before")
	churnPods(t, cs, "then", *pods)
	after, more := settled(fmt.Sprintf("after %d pods", 2**pods))
	writeProfile(t, "after")
	if after > before+slack {
		t.Errorf("the live heap grew from %.1f MiB in %d objects to %.1f MiB in %d while %d pods came and went",
			toMiB(before), objects, toMiB(after), more, *pods)
	}
}
