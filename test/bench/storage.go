package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/bench/figures"
)

// atOnce is how many claims are made at the same time.
const atOnce = 100

// volumeTimeout bounds a pod's start and end while many volumes are made.
const volumeTimeout = 3 * time.Minute

// storage measures fresh volumes: from the creation of a claim, and of the pod that uses it, until the pod is Ready, beside
// the same pod with an emptyDir, in turns; then many at once.
func (b *bench) storage(ctx context.Context, c *cluster) (err error) {
	namespace, remove, err := c.namespace(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if removed := remove(); err == nil {
			err = removed
		}
	}()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	o, err := observe(watching, c.client, namespace)
	if err != nil {
		return err
	}
	n := &nodeLoad{bench: b, cluster: c, observer: o, namespace: namespace}
	if err := n.warmUp(ctx); err != nil {
		return fmt.Errorf("warming up: %w", err)
	}
	if err := n.volumesInTurn(ctx); err != nil {
		return err
	}
	return n.volumesTogether(ctx)
}

// withVolume is the web server with a volume at /data: a claim's of the pod's name, or an emptyDir.
func withVolume(name string, claimed bool) *v1.Pod {
	p := webPod(name, "")
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	source := v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}
	if claimed {
		source = v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
	}
	p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: source}}
	return p
}

// startWith makes a claim, where the pod is to have one, and the pod, and returns how long it took until it was Ready.
func (n *nodeLoad) startWith(ctx context.Context, name string, claimed bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, volumeTimeout)
	defer cancel()
	began := time.Now()
	if claimed {
		_, err := n.client.CoreV1().PersistentVolumeClaims(n.namespace).Create(ctx, &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PersistentVolumeClaimSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				Resources: v1.VolumeResourceRequirements{Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("16Mi")}}}}, metav1.CreateOptions{})
		if err != nil {
			return 0, fmt.Errorf("creating claim %s: %w", name, err)
		}
	}
	if err := n.create(ctx, withVolume(name, claimed)); err != nil {
		return 0, err
	}
	s, err := n.await(ctx, name, "Ready", func(s seen) bool { return !s.ready.IsZero() })
	return s.ready.Sub(began), err
}

// endWith deletes a pod, and its claim, and returns how long the pod took to be gone.
func (n *nodeLoad) endWith(ctx context.Context, name string, claimed bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, volumeTimeout)
	defer cancel()
	began := time.Now()
	if err := n.client.CoreV1().Pods(n.namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return 0, fmt.Errorf("deleting pod %s: %w", name, err)
	}
	s, err := n.await(ctx, name, "gone", func(s seen) bool { return !s.gone.IsZero() })
	if claimed && err == nil {
		err = n.client.CoreV1().PersistentVolumeClaims(n.namespace).Delete(ctx, name, metav1.DeleteOptions{})
	}
	return s.gone.Sub(began), err
}

// kindsOfVolume are what is compared.
var kindsOfVolume = []struct {
	word    string
	claimed bool
}{{"an emptyDir", false}, {"a fresh volume", true}}

func (n *nodeLoad) volumesInTurn(ctx context.Context) error {
	n.say("%d pods with an emptyDir and %d with a fresh volume, in turns", n.inTurn, n.inTurn)
	started, ended := map[bool][]time.Duration{}, map[bool][]time.Duration{}
	for i := range n.inTurn {
		for _, k := range kindsOfVolume {
			name := fmt.Sprintf("turn-%d-%t", i, k.claimed)
			took, err := n.startWith(ctx, name, k.claimed)
			if err != nil {
				return err
			}
			gone, err := n.endWith(ctx, name, k.claimed)
			if err != nil {
				return err
			}
			started[k.claimed], ended[k.claimed] = append(started[k.claimed], took), append(ended[k.claimed], gone)
		}
	}
	for what, took := range map[string]map[bool][]time.Duration{"created to Ready": started, "deleted to gone": ended} {
		beside := figures.Latencies(took[false])
		for _, k := range kindsOfVolume {
			values := figures.Latencies(took[k.claimed])
			label := "pod with " + k.word + ", " + what
			n.records = append(n.records, figures.Record{Measure: label, Params: map[string]any{"pods": n.inTurn, "burst": 1}, Values: values})
			row := figures.Row{Measure: label + ", p50", Figure: values["p50_ms"], Unit: "ms"}
			if k.claimed {
				row.Reference = &figures.Reference{Name: "emptyDir", Figure: beside["p50_ms"]}
			}
			n.row(row)
		}
	}
	return nil
}

// all does something for as many pods as are made at once.
func (n *nodeLoad) all(do func(name string) (time.Duration, error), claimed bool) (map[string]float64, error) {
	took, errs := make([]time.Duration, atOnce), make([]error, atOnce)
	began := time.Now()
	var wg sync.WaitGroup
	for i := range atOnce {
		wg.Go(func() { took[i], errs[i] = do(fmt.Sprintf("once-%d-%t", i, claimed)) })
	}
	wg.Wait()
	values := figures.Latencies(took)
	values["rate"] = atOnce / time.Since(began).Seconds()
	return values, errors.Join(errs...)
}

func (n *nodeLoad) volumesTogether(ctx context.Context) error {
	for _, k := range kindsOfVolume {
		n.say("%d pods with %s at once", atOnce, k.word)
		for _, part := range []struct {
			what string
			do   func(context.Context, string, bool) (time.Duration, error)
		}{{"created to Ready", n.startWith}, {"deleted to gone", n.endWith}} {
			rec, err := n.measure(fmt.Sprintf("%d pods with %s at once, %s", atOnce, k.word, part.what), map[string]any{"burst": atOnce}, func() (map[string]float64, error) {
				return n.all(func(name string) (time.Duration, error) { return part.do(ctx, name, k.claimed) }, k.claimed)
			})
			if err != nil {
				return err
			}
			n.row(figures.Row{Measure: rec.Measure + ", p50", Figure: rec.Values["p50_ms"], Unit: "ms", Note: cost(rec)})
			n.row(figures.Row{Measure: rec.Measure + ", p99", Figure: rec.Values["p99_ms"], Unit: "ms"})
		}
	}
	return nil
}
