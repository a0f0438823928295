// Package discovery tells clients what is served: groups, versions, resources
// and their verbs, one document at a time or all in one.
package discovery

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"mime"
	"net/http"
	"slices"
	"sort"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// storedVerbs are those of a kind that is stored, in discovery's order.
var storedVerbs = []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}

// Documents are the discovery documents of a table of kinds, made once and immutable.
type Documents struct {
	plain  map[string]any // by path
	v2     []byte         // the aggregated forms
	v2beta []byte
	core2  []byte
	core2b []byte
	etag   string
}

// New makes the documents.
func New(kinds *api.Kinds) *Documents {
	groups := groupsOf(kinds)
	d := &Documents{plain: map[string]any{}}
	d.plain["/api"] = &metav1.APIVersions{
		TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"},
		ServerAddressByClientCIDRs: []metav1.ServerAddressByClientCIDR{},
	}
	list := &metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"}, Groups: []metav1.APIGroup{}}
	for _, g := range groups {
		for _, v := range g.versions {
			d.plain[v.path()] = v.resources()
		}
		if g.name != "" {
			one := g.apiGroup()
			list.Groups = append(list.Groups, one)
			one.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroup"}
			d.plain["/apis/"+g.name] = &one
		}
	}
	d.plain["/apis"] = list
	d.aggregate(groups)
	return d
}

// group is an API group with its versions, best first.
type group struct {
	name     string
	versions []*version
}

type version struct {
	gv    schema.GroupVersion
	kinds []*api.Kind
}

func groupsOf(kinds *api.Kinds) []*group {
	byName := map[string]*group{}
	var names []string
	for _, k := range kinds.All() {
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
	sort.Strings(names)
	out := make([]*group, len(names))
	for i, n := range names {
		out[i] = byName[n]
	}
	return out
}

func (v *version) path() string {
	if v.gv.Group == "" {
		return "/api/" + v.gv.Version
	}
	return "/apis/" + v.gv.String()
}

func (g *group) apiGroup() metav1.APIGroup {
	out := metav1.APIGroup{Name: g.name}
	for _, v := range g.versions {
		out.Versions = append(out.Versions, metav1.GroupVersionForDiscovery{GroupVersion: v.gv.String(), Version: v.gv.Version})
	}
	out.PreferredVersion = out.Versions[0]
	return out
}

func (v *version) resources() *metav1.APIResourceList {
	out := &metav1.APIResourceList{
		TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: v.gv.String(),
		APIResources: []metav1.APIResource{},
	}
	for _, k := range v.kinds {
		out.APIResources = append(out.APIResources, metav1.APIResource{
			Name: k.Resource, SingularName: k.Singular, Namespaced: k.Namespaced, Kind: k.GVK.Kind,
			Verbs: verbs(k), ShortNames: k.ShortNames, Categories: k.Categories, StorageVersionHash: storageHash(k),
		})
		for _, name := range subresources(k) {
			sub := k.Subresources[name]
			r := metav1.APIResource{Name: k.Resource + "/" + name, Namespaced: k.Namespaced, Kind: k.GVK.Kind, Verbs: sub.Verbs}
			if !sub.GVK.Empty() {
				r.Kind = sub.GVK.Kind
				if sub.GVK.GroupVersion() != k.GVK.GroupVersion() {
					r.Group, r.Version = sub.GVK.Group, sub.GVK.Version
				}
			}
			out.APIResources = append(out.APIResources, r)
		}
	}
	sort.SliceStable(out.APIResources, func(i, j int) bool { return out.APIResources[i].Name < out.APIResources[j].Name })
	return out
}

func verbs(k *api.Kind) metav1.Verbs {
	switch {
	case len(k.Verbs) > 0:
		return k.Verbs
	case k.Virtual:
		return metav1.Verbs{"create"}
	}
	return storedVerbs
}

// storageHash lets clients see whether a kind is stored as before.
func storageHash(k *api.Kind) string {
	if k.Virtual {
		return ""
	}
	sum := sha256.Sum256([]byte(k.GVK.String()))
	return hex.EncodeToString(sum[:6])
}

func subresources(k *api.Kind) []string {
	out := make([]string, 0, len(k.Subresources))
	for name := range k.Subresources {
		out = append(out, name)
	}
	sort.Strings(out)
	return out
}

// aggregate makes the documents that hold everything: core for /api, the rest for /apis.
func (d *Documents) aggregate(groups []*group) {
	core, rest := &apidiscoveryv2.APIGroupDiscoveryList{}, &apidiscoveryv2.APIGroupDiscoveryList{}
	for _, g := range groups {
		one := apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: g.name}}
		for _, v := range g.versions {
			one.Versions = append(one.Versions, apidiscoveryv2.APIVersionDiscovery{
				Version: v.gv.Version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent, Resources: v.discovery(),
			})
		}
		if g.name == "" {
			core.Items = append(core.Items, one)
		} else {
			rest.Items = append(rest.Items, one)
		}
	}
	encode := func(l *apidiscoveryv2.APIGroupDiscoveryList, version string) []byte {
		l.TypeMeta = metav1.TypeMeta{APIVersion: "apidiscovery.k8s.io/" + version, Kind: "APIGroupDiscoveryList"}
		data, err := json.Marshal(l)
		if err != nil {
			// Strings and slices of them: it cannot fail.
			panic("discovery: " + err.Error())
		}
		return data
	}
	d.v2, d.v2beta = encode(rest, "v2"), encode(rest, "v2beta1")
	d.core2, d.core2b = encode(core, "v2"), encode(core, "v2beta1")
	sum := sha256.Sum256(append(slices.Clone(d.v2), d.core2...))
	d.etag = `"` + strings.ToUpper(hex.EncodeToString(sum[:])) + `"`
}

func (v *version) discovery() []apidiscoveryv2.APIResourceDiscovery {
	var out []apidiscoveryv2.APIResourceDiscovery
	for _, k := range v.kinds {
		scope := apidiscoveryv2.ScopeCluster
		if k.Namespaced {
			scope = apidiscoveryv2.ScopeNamespace
		}
		r := apidiscoveryv2.APIResourceDiscovery{
			Resource: k.Resource, ResponseKind: groupVersionKind(k.GVK), Scope: scope, SingularResource: k.Singular,
			Verbs: verbs(k), ShortNames: k.ShortNames, Categories: k.Categories,
		}
		for _, name := range subresources(k) {
			sub := k.Subresources[name]
			gvk := sub.GVK
			if gvk.Empty() {
				gvk = k.GVK
			}
			r.Subresources = append(r.Subresources, apidiscoveryv2.APISubresourceDiscovery{
				Subresource: name, ResponseKind: groupVersionKind(gvk), Verbs: sub.Verbs,
			})
		}
		out = append(out, r)
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].Resource < out[j].Resource })
	return out
}

func groupVersionKind(k schema.GroupVersionKind) *metav1.GroupVersionKind {
	return &metav1.GroupVersionKind{Group: k.Group, Version: k.Version, Kind: k.Kind}
}

// Serve answers a discovery path; false when the path is none.
func (d *Documents) Serve(w http.ResponseWriter, r *http.Request) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	doc, ok := d.plain[path]
	if !ok {
		return false
	}
	if path == "/api" || path == "/apis" {
		w.Header().Add("Vary", "Accept")
		if version := wantsAggregated(r); version != "" {
			d.serveAggregated(w, r, path, version)
			return true
		}
	}
	data, err := json.Marshal(doc)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return true
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(data, '\n'))
	return true
}

func (d *Documents) serveAggregated(w http.ResponseWriter, r *http.Request, path, version string) {
	data := map[string][]byte{"/apisv2": d.v2, "/apisv2beta1": d.v2beta, "/apiv2": d.core2, "/apiv2beta1": d.core2b}[path+version]
	w.Header().Set("ETag", d.etag)
	w.Header().Set("Cache-Control", "public")
	if r.Header.Get("If-None-Match") == d.etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v="+version+";as=APIGroupDiscoveryList")
	_, _ = w.Write(data)
}

// wantsAggregated returns the version of the aggregated form that the client prefers; "" for the plain one.
func wantsAggregated(r *http.Request) string {
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Accept"), ","), ",") {
		media, params, err := mime.ParseMediaType(strings.TrimSpace(part))
		if err != nil {
			continue
		}
		switch {
		case media == "application/json" && params["as"] == "":
			return ""
		case media == "application/json" && params["as"] == "APIGroupDiscoveryList" && params["g"] == "apidiscovery.k8s.io" &&
			(params["v"] == "v2" || params["v"] == "v2beta1"):
			return params["v"]
		}
	}
	return ""
}
