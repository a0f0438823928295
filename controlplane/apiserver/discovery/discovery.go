// Package discovery serves the discovery documents: groups, versions, resources and their verbs. It
// serves them as plain documents, one for each group version, and as aggregated documents.
package discovery

import (
	"crypto/sha256"
	"encoding/base64"
	"net"
	"net/http"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiversion "k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
)

// storedVerbs are the verbs of a stored kind, in the order of discovery documents.
var storedVerbs = []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}

// Documents serves the discovery documents of the served kinds. After a change of the kinds, the
// next request generates them again. It is safe for concurrent use.
type Documents struct {
	kinds   *api.Kinds
	handler *endpoints.Handler
	mu      sync.Mutex // held while documents are generated
	current atomic.Pointer[documents]

	merging sync.Mutex
	merged  *mergedDocuments // the last generated documents that include aggregated API servers; guarded by merging
}

// New returns Documents that describe kinds. write encodes the responses.
func New(kinds *api.Kinds, write *endpoints.Handler) *Documents {
	return &Documents{kinds: kinds, handler: write}
}

// Serve serves a discovery path. It returns false if the path is not a discovery path.
func (d *Documents) Serve(w http.ResponseWriter, r *http.Request) bool {
	return d.serveFrom(w, r, d.currentDocuments())
}

func (d *Documents) currentDocuments() *documents {
	if is := d.current.Load(); is != nil && is.table == d.kinds.Table() {
		return is
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t, is := d.kinds.Table(), d.current.Load()
	if is == nil || is.table != t {
		is = documentsOf(t)
		d.current.Store(is)
	}
	return is
}

// documents are the discovery documents generated from one table of kinds. They are immutable.
type documents struct {
	table      *api.Table
	plain      map[string]runtime.Object // by path
	aggregated map[string]aggregated     // by path
}

func documentsOf(t *api.Table) *documents {
	groups := groupsOf(t)
	d := &documents{table: t, plain: map[string]runtime.Object{}, aggregated: aggregateGroups(groups)}
	d.plain["/api"] = &metav1.APIVersions{
		TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"},
		ServerAddressByClientCIDRs: []metav1.ServerAddressByClientCIDR{},
	}
	list := &metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"},
		Groups: []metav1.APIGroup{}}
	for _, g := range groups {
		for _, v := range g.versions {
			d.plain[v.documentPath()] = v.resourceList()
		}
		if g.name != "" {
			one := g.apiGroup()
			list.Groups = append(list.Groups, one)
			one.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroup"}
			d.plain["/apis/"+g.name] = &one
		}
	}
	d.plain["/apis"] = list
	return d
}

// group is an API group with its versions, the preferred version first.
type group struct {
	name     string
	versions []*version
}

type version struct {
	gv    schema.GroupVersion
	kinds []*api.Kind
}

func groupsOf(kinds *api.Table) []*group {
	byName := map[string]*group{}
	var names []string
	for _, k := range kinds.Visible() {
		g := byName[k.GVK.Group]
		if g == nil {
			g = &group{name: k.GVK.Group}
			byName[g.name] = g
			names = append(names, g.name)
		}
		i := slices.IndexFunc(g.versions, func(v *version) bool { return v.gv == k.GVK.GroupVersion() })
		if i < 0 {
			g.versions = append(g.versions, &version{gv: k.GVK.GroupVersion()})
			i = len(g.versions) - 1
		}
		g.versions[i].kinds = append(g.versions[i].kinds, k)
	}
	slices.SortFunc(names, compareGroups)
	out := make([]*group, len(names))
	for i, n := range names {
		out[i] = byName[n]
		slices.SortFunc(out[i].versions, func(a, b *version) int {
			return apiversion.CompareKubeAwareVersionStrings(b.gv.Version, a.gv.Version)
		})
	}
	return out
}

func (v *version) documentPath() string {
	if v.gv.Group == "" {
		return "/api/" + v.gv.Version
	}
	return "/apis/" + v.gv.String()
}

func (g *group) apiGroup() metav1.APIGroup {
	out := metav1.APIGroup{Name: g.name}
	for _, v := range g.versions {
		out.Versions = append(out.Versions, metav1.GroupVersionForDiscovery{GroupVersion: v.gv.String(),
			Version: v.gv.Version})
	}
	out.PreferredVersion = out.Versions[0]
	return out
}

func (v *version) resourceList() *metav1.APIResourceList {
	out := &metav1.APIResourceList{
		TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: v.gv.String(),
		APIResources: []metav1.APIResource{},
	}
	for _, k := range v.kinds {
		out.APIResources = append(out.APIResources, metav1.APIResource{
			Name: k.Resource, SingularName: k.Naming.Singular, Namespaced: k.Namespaced, Kind: k.GVK.Kind,
			Verbs: kindVerbs(k), ShortNames: k.Naming.ShortNames, Categories: k.Naming.Categories,
			StorageVersionHash: storageHash(k),
		})
		for _, name := range subresourceNames(k) {
			sub := k.Subresources[name]
			r := metav1.APIResource{Name: k.Resource + "/" + name, Namespaced: k.Namespaced, Kind: k.GVK.Kind,
				Verbs: sub.Verbs}
			if !sub.GVK.Empty() {
				r.Kind = sub.GVK.Kind
				if sub.GVK.GroupVersion() != k.GVK.GroupVersion() {
					r.Group, r.Version = sub.GVK.Group, sub.GVK.Version
				}
			}
			out.APIResources = append(out.APIResources, r)
		}
	}
	sort.SliceStable(out.APIResources, func(i, j int) bool {
		return out.APIResources[i].Name < out.APIResources[j].Name
	})
	return out
}

func kindVerbs(k *api.Kind) metav1.Verbs {
	if len(k.Serving.Verbs) > 0 {
		return k.Serving.Verbs
	}
	return storedVerbs
}

// storageVersionHash returns the hash of a stored version, computed as in Kubernetes, so that the
// tools of Kubernetes accept it.
func storageVersionHash(gvk schema.GroupVersionKind) string {
	sum := sha256.Sum256([]byte(gvk.Group + "/" + gvk.Version + "/" + gvk.Kind))
	return base64.StdEncoding.EncodeToString(sum[:8])
}

func subresourceNames(k *api.Kind) []string {
	out := make([]string, 0, len(k.Subresources))
	for name := range k.Subresources {
		out = append(out, name)
	}
	sort.Strings(out)
	return out
}

// serveFrom serves a discovery path from the given documents. It returns false if they do not
// contain the path.
func (d *Documents) serveFrom(w http.ResponseWriter, r *http.Request, docs *documents) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	doc, ok := docs.plain[path]
	if !ok {
		return false
	}
	if all, both := docs.aggregated[path]; both {
		w.Header().Add("Vary", "Accept")
		if media, version, wanted := wantsAggregated(r); wanted {
			d.serveAggregated(w, r, all, media, version)
			return true
		}
	}
	if versions, ok := doc.(*metav1.APIVersions); ok {
		doc = withServerAddress(versions, r)
	}
	d.handler.WriteDocument(w, r, doc)
	return true
}

// withServerAddress returns a copy of versions that contains the address of this replica.
func withServerAddress(versions *metav1.APIVersions, r *http.Request) *metav1.APIVersions {
	out := *versions
	if here, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		out.ServerAddressByClientCIDRs = []metav1.ServerAddressByClientCIDR{{ClientCIDR: "0.0.0.0/0",
			ServerAddress: here.String()}}
	}
	return &out
}
