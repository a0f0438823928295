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

// maxKindSeries limits the number of kinds with series of their own. The creation of many kinds
// must not exhaust the memory. Requests for further kinds are counted under otherKinds.
const (
	maxKindSeries = 512
	otherKinds    = "other"
)

// kindSeries is the set of kinds with series of their own. The series of a kind that is no longer
// served are deleted.
type kindSeries struct {
	kinds  *api.Kinds
	forget func(prometheus.Labels)

	mu    sync.Mutex
	table *api.Table
	have  map[schema.GroupVersionResource]bool
}

// labels returns the label values of a kind: its group, version and resource, or otherKinds if the
// kind has no series.
func (s *kindSeries) labels(k *api.Kind) (group, version, resource string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow()
	gvr := k.GVR()
	if !s.have[gvr] {
		if len(s.have) >= maxKindSeries || s.table.ByResource(gvr) == nil {
			return "", "", otherKinds
		}
		s.have[gvr] = true
	}
	return gvr.Group, gvr.Version, gvr.Resource
}

// serves reports whether the kind is still served.
func (s *kindSeries) serves(k *api.Kind) bool { return s.kinds.ByResource(k.GVR()) != nil }

// follow deletes the series of kinds that are no longer served. The caller holds mu.
func (s *kindSeries) follow() {
	now := s.kinds.Table()
	if now == s.table {
		return
	}
	if s.table = now; s.have == nil {
		s.have = map[schema.GroupVersionResource]bool{}
	}
	for gvr := range s.have {
		if now.ByResource(gvr) == nil {
			delete(s.have, gvr)
			s.forget(prometheus.Labels{"group": gvr.Group, "version": gvr.Version, "resource": gvr.Resource})
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
	storageObjects = prometheus.NewDesc("apiserver_storage_objects", "Stored objects by resource.", []string{"resource"}, nil)
	groupObjects   = prometheus.NewDesc("apiserver_resource_objects", "Stored objects by group and resource.", []string{"group", "resource"}, nil)
)

// Describe implements prometheus.Collector.
func (s storedObjects) Describe(ch chan<- *prometheus.Desc) {
	ch <- storageObjects
	ch <- groupObjects
}

// Collect implements prometheus.Collector. Versions of a resource share their objects and are
// exported once.
func (s storedObjects) Collect(ch chan<- prometheus.Metric) {
	seen := map[schema.GroupResource]bool{}
	for _, k := range s.kinds.All() {
		of := k.GroupResource()
		if k.Virtual || seen[of] {
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

// undecodable exports the stored objects that the registry cannot decode: their number per resource
// and the names of the first undecodableNamed.
type undecodable struct{ objects *registry.Registry }

// undecodableNamed limits the series that contain an object's name.
const undecodableNamed = 100

var (
	undecodableCount = prometheus.NewDesc("keelson_undecodable_objects", "Stored objects that cannot be read.",
		[]string{"group", "resource"}, nil)
	undecodableName = prometheus.NewDesc("keelson_undecodable_object",
		"1 for each stored object that cannot be read, the first 100 of them.",
		[]string{"group", "resource", "namespace", "name"}, nil)
)

// Describe implements prometheus.Collector.
func (u undecodable) Describe(ch chan<- *prometheus.Desc) {
	ch <- undecodableCount
	ch <- undecodableName
}

// Collect implements prometheus.Collector.
func (u undecodable) Collect(ch chan<- prometheus.Metric) {
	count := map[*api.Kind]int{}
	for i, o := range u.objects.Unreadable() {
		count[o.Kind]++
		if i < undecodableNamed {
			ch <- prometheus.MustNewConstMetric(undecodableName, prometheus.GaugeValue, 1, o.Kind.GVK.Group, o.Kind.Resource,
				strings.ToValidUTF8(o.Namespace, "?"), strings.ToValidUTF8(o.Name, "?"))
		}
	}
	for k, n := range count {
		ch <- prometheus.MustNewConstMetric(undecodableCount, prometheus.GaugeValue, float64(n), k.GVK.Group, k.Resource)
	}
}
