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

// concurrentClaims is the number of claims that are created concurrently.
const concurrentClaims = 100

// volumeTimeout is the time limit for a pod's start or deletion while many volumes are created.
const volumeTimeout = 3 * time.Minute

// measureStorage measures new volumes, from the creation of a claim and its pod until the pod is
// Ready. It compares them in turn with the same pod with an emptyDir, and then measures many at
// once.
func (b *benchmarks) measureStorage(ctx context.Context, c *cluster) error {
	return b.withPodLoad(ctx, c, func(n *podLoad) error {
		if err := n.measureVolumesInTurn(ctx); err != nil {
			return err
		}
		return n.measureConcurrentVolumes(ctx)
	})
}

// newPodWithVolume returns the web server with a volume at /data: a claim of the same name, or an
// emptyDir.
func newPodWithVolume(name string, claimed bool) *v1.Pod {
	p := newWebPod(name, "")
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	source := v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}
	if claimed {
		source = v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
	}
	p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: source}}
	return p
}

// startPodWithVolume creates a pod with this kind of volume, and before it the claim if volume is
// newVolume. It returns the time until the pod is Ready.
func (n *podLoad) startPodWithVolume(ctx context.Context, name string, volume volumeKind) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, volumeTimeout)
	defer cancel()
	began := time.Now()
	if volume == newVolume {
		_, err := n.cluster.client.CoreV1().PersistentVolumeClaims(n.namespace).Create(ctx,
			&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: v1.PersistentVolumeClaimSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
					Resources: v1.VolumeResourceRequirements{
						Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("16Mi")}}}},
			metav1.CreateOptions{})
		if err != nil {
			return 0, fmt.Errorf("creating claim %s: %w", name, err)
		}
	}
	if err := n.createPod(ctx, newPodWithVolume(name, volume != emptyDir)); err != nil {
		return 0, err
	}
	s, err := n.observer.awaitPod(ctx, name, "Ready", func(s podView) bool { return !s.ready.IsZero() })
	return s.ready.Sub(began), err
}

// deletePodWithVolume deletes a pod and optionally its claim. It returns the time until the pod is
// gone.
func (n *podLoad) deletePodWithVolume(ctx context.Context, name string, claimToo bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, volumeTimeout)
	defer cancel()
	took, err := n.deleteAndAwaitGone(ctx, name)
	if claimToo && err == nil {
		err = n.cluster.client.CoreV1().PersistentVolumeClaims(n.namespace).Delete(ctx, name, metav1.DeleteOptions{})
	}
	return took, err
}

// volumeKind is the kind of volume at /data.
type volumeKind int

const (
	emptyDir       volumeKind = iota
	newVolume                 // of a claim that is created with the pod
	existingVolume            // of a claim that an earlier pod used
)

func (k volumeKind) String() string {
	return [...]string{"an emptyDir", "a fresh volume", "a volume that was there"}[k]
}

func (n *podLoad) measureVolumesInTurn(ctx context.Context) error {
	n.run.tally.LogProgress("%d pods with an emptyDir and %d with a fresh volume, in turns",
		n.run.options.sequentialPods,
		n.run.options.sequentialPods)
	kinds := []volumeKind{emptyDir, newVolume}
	started, ended := map[volumeKind][]time.Duration{}, map[volumeKind][]time.Duration{}
	for i := range n.run.options.sequentialPods {
		for _, k := range kinds {
			name := fmt.Sprintf("turn-%d-%d", i, k)
			took, err := n.startPodWithVolume(ctx, name, k)
			if err != nil {
				return err
			}
			gone, err := n.deletePodWithVolume(ctx, name, k == newVolume)
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
			n.run.tally.Records = append(n.run.tally.Records, figures.Record{Measure: label,
				Params: map[string]any{"pods": n.run.options.sequentialPods, "burst": 1}, Values: values})
			row := figures.Row{Measure: label + ", p50", Figure: values["p50_ms"], Unit: "ms"}
			if k == newVolume {
				row.Key, row.Reference = part.key, &figures.Reference{Name: "emptyDir", Figure: beside["p50_ms"]}
			}
			n.run.tally.AddRow(row)
		}
	}
	return nil
}

// measureConcurrentPods calls do concurrently for concurrentClaims pods with the kind k of volume.
// It adds a record and the rows with the results. what names the measured operation.
func (n *podLoad) measureConcurrentPods(k volumeKind, what string, do func(name string) (time.Duration, error)) (
	figures.Record, error,
) {
	claim := min(k, newVolume) // existingVolume uses the claims of newVolume
	rec, err := n.run.runMeasurement(fmt.Sprintf("%d pods with %s at once, %s", concurrentClaims, k, what),
		map[string]any{"burst": concurrentClaims}, func() (map[string]float64, error) {
			took, all, err := runConcurrently(concurrentClaims, func(i int) (time.Duration, error) {
				return do(fmt.Sprintf("once-%d-%d", i, claim))
			})
			values := figures.Latencies(took)
			values["rate"] = concurrentClaims / all.Seconds()
			return values, err
		})
	if err != nil {
		return rec, err
	}
	n.run.tally.AddRow(figures.Row{Measure: rec.Measure + ", p50", Figure: rec.Values["p50_ms"], Unit: "ms",
		Note: formatCost(rec)})
	n.run.tally.AddRow(figures.Row{Measure: rec.Measure + ", p99", Figure: rec.Values["p99_ms"], Unit: "ms"})
	return rec, nil
}

// measureConcurrentVolumes measures many pods at once with each kind of volume. The CPU time of
// pods with an emptyDir is subtracted to get the cost of a mount or unmount.
func (n *podLoad) measureConcurrentVolumes(ctx context.Context) error {
	up, down := map[volumeKind]float64{}, map[volumeKind]float64{} // CPU milliseconds per pod
	for _, k := range []volumeKind{emptyDir, newVolume, existingVolume} {
		n.run.tally.LogProgress("%d pods with %s at once", concurrentClaims, k)
		rec, err := n.measureConcurrentPods(k, "created to Ready", func(name string) (time.Duration, error) {
			return n.startPodWithVolume(ctx, name, k)
		})
		if err != nil {
			return err
		}
		up[k] = cpuMillisPerPod(rec)
		rec, err = n.measureConcurrentPods(k, "deleted to gone", func(name string) (time.Duration, error) {
			return n.deletePodWithVolume(ctx, name, k == existingVolume)
		})
		if err != nil {
			return err
		}
		down[k] = cpuMillisPerPod(rec)
	}
	for _, c := range []struct {
		what string
		of   map[volumeKind]float64
		kind volumeKind
	}{
		{"creating and mounting a volume", up, newVolume}, {"mounting a volume", up, existingVolume},
		{"unmounting a volume", down, newVolume},
	} {
		n.run.tally.AddRow(figures.Row{Measure: "CPU time of " + c.what, Figure: c.of[c.kind] - c.of[emptyDir],
			Unit: "ms",
			Note: fmt.Sprintf("CPU of replicas and workers per pod: %.1f ms with the volume, %.1f ms with an emptyDir",
				c.of[c.kind], c.of[emptyDir])})
	}
	return nil
}

// cpuMillisPerPod returns the cluster's CPU milliseconds per pod.
func cpuMillisPerPod(r figures.Record) float64 {
	replicas, workers := cpuSeconds(r)
	return 1000 * (replicas + workers) / concurrentClaims
}
