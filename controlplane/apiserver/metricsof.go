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

// maxKindSeries bounds the kinds that have series of their own: whoever may make kinds must not fill the memory with
// series. What comes beyond is counted together, as otherKinds.
const (
	maxKindSeries = 512
	otherKinds    = "other"
)

// kindSeries knows which kinds have series. Those of a kind that is not served any more are forgotten.
type kindSeries struct {
	kinds  *api.Kinds
	forget func(prometheus.Labels)

	mu    sync.Mutex
	table *api.Table
	have  map[schema.GroupVersionResource]bool
}

// labels are group, version and resource of a kind, as far as it has series of its own.
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

// serves says whether the kind is in the table still.
func (s *kindSeries) serves(k *api.Kind) bool { return s.kinds.ByResource(k.GVR()) != nil }

// follow forgets the series of kinds that have gone. The caller holds mu.
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

// storedObjects shows how many objects of each resource there are, under both names that Kubernetes has for that.
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

// Collect implements prometheus.Collector. Versions of a resource have the same objects and are shown once.
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

// undecodable shows what the registry cannot read: how many objects per resource, and the first ones by name.
type undecodable struct{ objects *registry.Registry }

// undecodableNamed bounds the series with a name in them.
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
