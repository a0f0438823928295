package apiserver

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
)

const applyPatch = types.ApplyYAMLPatchType

// maxKindSeries is the maximum number of kinds with their own metric series, so that the creation
// of many kinds does not exhaust the memory. Requests for further kinds are counted under
// otherKinds.
const (
	maxKindSeries = 512
	otherKinds    = "other"
)

// kindSeries is the set of kinds with their own metric series. The series of a kind that is no
// longer served are deleted.
type kindSeries struct {
	kinds        *api.Kinds
	deleteSeries func(prometheus.Labels)

	mu     sync.Mutex
	table  *api.Table
	served map[schema.GroupVersionResource]bool
}

// kindLabels returns the label values of a kind: its group, version and resource, or otherKinds if
// the kind has no series of its own.
func (s *kindSeries) kindLabels(k *api.Kind) (group, version, resource string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropUnserved()
	gvr := k.GVR()
	if !s.served[gvr] {
		if len(s.served) >= maxKindSeries || s.table.ByResource(gvr) == nil {
			return "", "", otherKinds
		}
		s.served[gvr] = true
	}
	return gvr.Group, gvr.Version, gvr.Resource
}

// isServed reports whether a kind with the same group, version and resource is still served.
func (s *kindSeries) isServed(k *api.Kind) bool { return s.kinds.ByResource(k.GVR()) != nil }

// dropUnserved deletes the metric series of kinds that are no longer served. The caller holds mu.
func (s *kindSeries) dropUnserved() {
	now := s.kinds.Table()
	if now == s.table {
		return
	}
	if s.table = now; s.served == nil {
		s.served = map[schema.GroupVersionResource]bool{}
	}
	for gvr := range s.served {
		if now.ByResource(gvr) == nil {
			delete(s.served, gvr)
			s.deleteSeries(prometheus.Labels{"group": gvr.Group, "version": gvr.Version, "resource": gvr.Resource})
		}
	}
}

// storedObjects exports the number of stored objects per resource, under both metric names of
// Kubernetes.
type storedObjects struct {
	kinds   *api.Kinds
	objects *registry.Registry
}

var (
	storageObjects = prometheus.NewDesc("apiserver_storage_objects", "Stored objects by resource.",
		[]string{"resource"}, nil)
	groupObjects = prometheus.NewDesc("apiserver_resource_objects", "Stored objects by group and resource.",
		[]string{"group", "resource"}, nil)
)

// Describe implements prometheus.Collector.
func (s storedObjects) Describe(ch chan<- *prometheus.Desc) {
	ch <- storageObjects
	ch <- groupObjects
}

// Collect implements prometheus.Collector. The versions of a resource share their objects, which
// are counted only once.
func (s storedObjects) Collect(ch chan<- prometheus.Metric) {
	seen := map[schema.GroupResource]bool{}
	for _, k := range s.kinds.All() {
		of := k.GroupResource()
		if k.Serving.Virtual || seen[of] {
			continue
		}
		if seen[of] = true; len(seen) > maxKindSeries {
			return
		}
		n := float64(s.objects.Count(k))
		ch <- prometheus.MustNewConstMetric(storageObjects, prometheus.GaugeValue, n, of.String())
		ch <- prometheus.MustNewConstMetric(groupObjects, prometheus.GaugeValue, n, of.Group, of.Resource)
	}
}

// undecodableObjects exports the stored objects that the registry cannot decode: their number per
// resource and the names of the first maxUndecodableNamed.
type undecodableObjects struct{ objects *registry.Registry }

// maxUndecodableNamed limits the series that contain an object's name.
const maxUndecodableNamed = 100

var (
	undecodableCount = prometheus.NewDesc("keelson_undecodable_objects", "Stored objects that cannot be read.",
		[]string{"group", "resource"}, nil)
	undecodableName = prometheus.NewDesc("keelson_undecodable_object",
		"1 for each stored object that cannot be read, the first 100 of them.",
		[]string{"group", "resource", "namespace", "name"}, nil)
)

// Describe implements prometheus.Collector.
func (u undecodableObjects) Describe(ch chan<- *prometheus.Desc) {
	ch <- undecodableCount
	ch <- undecodableName
}

// Collect implements prometheus.Collector.
func (u undecodableObjects) Collect(ch chan<- prometheus.Metric) {
	count := map[*api.Kind]int{}
	for i, o := range u.objects.Unreadable() {
		count[o.Kind]++
		if i < maxUndecodableNamed {
			ch <- prometheus.MustNewConstMetric(undecodableName, prometheus.GaugeValue, 1, o.Kind.GVK.Group,
				o.Kind.Resource,
				strings.ToValidUTF8(o.Namespace, "?"), strings.ToValidUTF8(o.Name, "?"))
		}
	}
	for k, n := range count {
		ch <- prometheus.MustNewConstMetric(undecodableCount, prometheus.GaugeValue, float64(n),
			k.GVK.Group, k.Resource)
	}
}
