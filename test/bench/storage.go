package main

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/bench/figures"
)

// claimsAtOnce is how many claims are made at the same time.
const claimsAtOnce = 100

// volumeTimeout bounds a pod's start and end while many volumes are made.
const volumeTimeout = 3 * time.Minute

// storage measures fresh volumes: from the creation of a claim, and of the pod that uses it, until the pod is Ready, beside
// the same pod with an emptyDir, in turns; then many at once.
func (b *bench) storage(ctx context.Context, c *cluster) error {
	return b.onPods(ctx, c, func(n *nodeLoad) error {
		if err := n.volumesInTurn(ctx); err != nil {
			return err
		}
		return n.volumesTogether(ctx)
	})
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

// startWith makes a claim, where the pod is to have a new one, and the pod, and returns how long it took until it was Ready.
func (n *nodeLoad) startWith(ctx context.Context, name string, volume volumeKind) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, volumeTimeout)
	defer cancel()
	began := time.Now()
	if volume == freshVolume {
		_, err := n.client.CoreV1().PersistentVolumeClaims(n.namespace).Create(ctx, &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PersistentVolumeClaimSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				Resources: v1.VolumeResourceRequirements{Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("16Mi")}}}}, metav1.CreateOptions{})
		if err != nil {
			return 0, fmt.Errorf("creating claim %s: %w", name, err)
		}
	}
	if err := n.create(ctx, withVolume(name, volume != emptyDir)); err != nil {
		return 0, err
	}
	s, err := n.await(ctx, name, "Ready", func(s seen) bool { return !s.ready.IsZero() })
	return s.ready.Sub(began), err
}

// endWith deletes a pod, and its claim where that is to go too, and returns how long the pod took to be gone.
func (n *nodeLoad) endWith(ctx context.Context, name string, claimToo bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, volumeTimeout)
	defer cancel()
	took, err := n.untilGone(ctx, name)
	if claimToo && err == nil {
		err = n.client.CoreV1().PersistentVolumeClaims(n.namespace).Delete(ctx, name, metav1.DeleteOptions{})
	}
	return took, err
}

// volumeKind is what a pod has at /data.
type volumeKind int

const (
	emptyDir    volumeKind = iota
	freshVolume            // of a claim that is made with the pod
	oldVolume              // of a claim that an earlier pod had
)

func (k volumeKind) String() string {
	return [...]string{"an emptyDir", "a fresh volume", "a volume that was there"}[k]
}

func (n *nodeLoad) volumesInTurn(ctx context.Context) error {
	n.Say("%d pods with an emptyDir and %d with a fresh volume, in turns", n.inTurn, n.inTurn)
	kinds := []volumeKind{emptyDir, freshVolume}
	started, ended := map[volumeKind][]time.Duration{}, map[volumeKind][]time.Duration{}
	for i := range n.inTurn {
		for _, k := range kinds {
			name := fmt.Sprintf("turn-%d-%d", i, k)
			took, err := n.startWith(ctx, name, k)
			if err != nil {
				return err
			}
			gone, err := n.endWith(ctx, name, k == freshVolume)
			if err != nil {
				return err
			}
			started[k], ended[k] = append(started[k], took), append(ended[k], gone)
		}
	}
	for _, part := range []struct {
		what, key string
		took      map[volumeKind][]time.Duration
	}{{"created to Ready", "storage fresh p50_ms", started}, {"deleted to gone", "", ended}} {
		beside := figures.Latencies(part.took[emptyDir])
		for _, k := range kinds {
			values := figures.Latencies(part.took[k])
			label := fmt.Sprintf("pod with %s, %s", k, part.what)
			n.Records = append(n.Records, figures.Record{Measure: label, Params: map[string]any{"pods": n.inTurn, "burst": 1}, Values: values})
			row := figures.Row{Measure: label + ", p50", Figure: values["p50_ms"], Unit: "ms"}
			if k == freshVolume {
				row.Key, row.Reference = part.key, &figures.Reference{Name: "emptyDir", Figure: beside["p50_ms"]}
			}
			n.Row(row)
		}
	}
	return nil
}

// allAtOnce does something for as many pods as are made at once, and says what it took.
func (n *nodeLoad) allAtOnce(k volumeKind, what string, do func(name string) (time.Duration, error)) (figures.Record, error) {
	claim := min(k, freshVolume) // a volume that was there is that of the pod before
	rec, err := n.measure(fmt.Sprintf("%d pods with %s at once, %s", claimsAtOnce, k, what), map[string]any{"burst": claimsAtOnce}, func() (map[string]float64, error) {
		took, all, err := atOnce(claimsAtOnce, func(i int) (time.Duration, error) { return do(fmt.Sprintf("once-%d-%d", i, claim)) })
		values := figures.Latencies(took)
		values["rate"] = claimsAtOnce / all.Seconds()
		return values, err
	})
	if err != nil {
		return rec, err
	}
	n.Row(figures.Row{Measure: rec.Measure + ", p50", Figure: rec.Values["p50_ms"], Unit: "ms", Note: cost(rec)})
	n.Row(figures.Row{Measure: rec.Measure + ", p99", Figure: rec.Values["p99_ms"], Unit: "ms"})
	return rec, nil
}

// volumesTogether makes many pods at once with each kind of volume. What a mount and an unmount cost is what pods with
// volumes that were there take of processors beyond what those with an emptyDir do.
func (n *nodeLoad) volumesTogether(ctx context.Context) error {
	up, down := map[volumeKind]float64{}, map[volumeKind]float64{} // ms of processors for each pod
	for _, k := range []volumeKind{emptyDir, freshVolume, oldVolume} {
		n.Say("%d pods with %s at once", claimsAtOnce, k)
		rec, err := n.allAtOnce(k, "created to Ready", func(name string) (time.Duration, error) { return n.startWith(ctx, name, k) })
		if err != nil {
			return err
		}
		up[k] = perPod(rec)
		rec, err = n.allAtOnce(k, "deleted to gone", func(name string) (time.Duration, error) { return n.endWith(ctx, name, k == oldVolume) })
		if err != nil {
			return err
		}
		down[k] = perPod(rec)
	}
	for _, c := range []struct {
		what string
		of   map[volumeKind]float64
		kind volumeKind
	}{
		{"making and mounting a volume", up, freshVolume}, {"mounting a volume", up, oldVolume}, {"unmounting a volume", down, freshVolume},
	} {
		n.Row(figures.Row{Measure: "processor time of " + c.what, Figure: c.of[c.kind] - c.of[emptyDir], Unit: "ms",
			Note: fmt.Sprintf("a pod with it takes %.1f ms, one with an emptyDir %.1f ms, of replicas and workers", c.of[c.kind], c.of[emptyDir])})
	}
	return nil
}

// perPod is how many milliseconds of processors the cluster took for each of the pods.
func perPod(r figures.Record) float64 {
	replicas, workers := cpuOf(r)
	return 1000 * (replicas + workers) / claimsAtOnce
}
