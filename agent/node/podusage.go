package node

import (
	"context"
	"math"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/resource"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/internal/saturate"
)

// measureTimeout is the maximum time for measuring the pods' disk usage for an eviction. After it,
// only the pods that were measured are ranked.
const measureTimeout = 20 * time.Second

// measureInterval is the minimum time between two disk measurements if the previous one did not
// lead to an eviction.
const measureInterval = time.Minute

// podUsageReader measures how much of a scarce resource the pods of the node use, and returns the
// pods that may be evicted.
type podUsageReader struct {
	// nil: memory usage of pods is unknown, so they are not ranked by it
	measure func(context.Context) (*agent.UsageSnapshot, error)
	// time of the last disk measurement; zero = it led to an eviction
	measuredInVain time.Time
}

// evictionCandidates returns the pods that may be evicted, with their usage of the resource of the
// signal s. It omits pods with unknown usage.
func (r *podUsageReader) evictionCandidates(
	ctx context.Context, from evictablePods, s eviction.Signal,
) ([]eviction.Candidate, error) {
	// Critical pods are not evicted, so they are not measured.
	pods := slices.DeleteFunc(from.EvictablePods(), agent.IsCritical)
	if len(pods) == 0 {
		return nil, nil
	}
	var used map[types.UID]podUse
	var err error
	if s.IsDisk() {
		r.measuredInVain = time.Now()
		used = r.diskUsage(ctx, from, pods, s)
	} else {
		used, err = r.memoryUsage(ctx)
	}
	var out []eviction.Candidate
	for _, pod := range pods {
		u, ok := used[pod.UID]
		if !ok {
			continue
		}
		c := eviction.Candidate{Pod: pod, Used: u.total,
			Request: requestOf(resource.PodRequests(pod, resource.PodResourcesOptions{}), s)}
		for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range list {
				if n, ok := u.containers[list[i].Name]; ok {
					c.Containers = append(c.Containers,
						eviction.Container{Name: list[i].Name, Used: n,
							Request: requestOf(list[i].Resources.Requests, s)})
				}
			}
		}
		out = append(out, c)
	}
	return out, err
}

func requestOf(l v1.ResourceList, s eviction.Signal) int64 {
	q := l[s.Resource()]
	return saturate.Value(&q)
}

// podUse is the usage of a pod and its containers, in bytes or inodes.
type podUse struct {
	total      int64
	containers map[string]int64
}

func (r *podUsageReader) memoryUsage(ctx context.Context) (map[types.UID]podUse, error) {
	if r.measure == nil {
		return nil, nil
	}
	m, err := r.measure(ctx)
	if m == nil {
		return nil, err
	}
	out := map[types.UID]podUse{}
	for i := range m.Pods {
		u := podUse{toInt64(m.Pods[i].WorkingSet), map[string]int64{}}
		for _, c := range m.Pods[i].Containers {
			u.containers[c.Name] = toInt64(c.WorkingSet)
		}
		out[m.Pods[i].UID] = u
	}
	return out, err
}

func (r *podUsageReader) diskUsage(
	ctx context.Context, from evictablePods, pods []*v1.Pod, s eviction.Signal,
) map[types.UID]podUse {
	bounded, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	out := map[types.UID]podUse{}
	for uid, st := range from.MeasureStorage(bounded, pods) {
		if s == eviction.Inodes {
			out[uid] = podUse{total: toInt64(st.Inodes)}
			continue
		}
		u := podUse{toInt64(st.Used), map[string]int64{}}
		for name, c := range st.Containers {
			u.containers[name] = toInt64(c.Layer + c.Logs)
		}
		out[uid] = u
	}
	return out
}

func toInt64(n uint64) int64 { return int64(min(n, math.MaxInt64)) }
