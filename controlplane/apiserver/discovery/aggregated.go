package discovery

import (
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"net/http"
	"sort"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
)

// Group and kind of the aggregated discovery document, which describes all groups in one document.
const (
	aggregatedGroup = "apidiscovery.k8s.io"
	aggregatedKind  = "APIGroupDiscoveryList"
)

// aggregated is an aggregated discovery document: all groups below /api or below /apis.
type aggregated struct {
	list *apidiscoveryv2.APIGroupDiscoveryList
	etag string
}

// aggregateGroups returns the aggregated documents by path: the core group for /api, all other
// groups for /apis.
func aggregateGroups(groups []*group) map[string]aggregated {
	core, rest := &apidiscoveryv2.APIGroupDiscoveryList{}, &apidiscoveryv2.APIGroupDiscoveryList{}
	for _, g := range groups {
		one := apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: g.name}}
		for _, v := range g.versions {
			one.Versions = append(one.Versions, apidiscoveryv2.APIVersionDiscovery{
				Version: v.gv.Version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent,
				Resources: v.discoveryResources(),
			})
		}
		if g.name == "" {
			core.Items = append(core.Items, one)
		} else {
			rest.Items = append(rest.Items, one)
		}
	}
	return map[string]aggregated{"/api": withETag(core), "/apis": withETag(rest)}
}

func withETag(l *apidiscoveryv2.APIGroupDiscoveryList) aggregated {
	data, err := json.Marshal(l)
	if err != nil {
		// Lists of strings always encode.
		panic("discovery: " + err.Error())
	}
	return aggregated{l, fmt.Sprintf(`"%X"`, sha512.Sum512(data))}
}

func (v *version) discoveryResources() []apidiscoveryv2.APIResourceDiscovery {
	var out []apidiscoveryv2.APIResourceDiscovery
	for _, k := range v.kinds {
		scope := apidiscoveryv2.ScopeCluster
		if k.Namespaced {
			scope = apidiscoveryv2.ScopeNamespace
		}
		r := apidiscoveryv2.APIResourceDiscovery{
			Resource: k.Resource, ResponseKind: groupVersionKind(k.GVK), Scope: scope,
			SingularResource: k.Naming.Singular,
			Verbs:            kindVerbs(k), ShortNames: k.Naming.ShortNames, Categories: k.Naming.Categories,
		}
		for _, name := range subresourceNames(k) {
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

// wantsAggregated returns the media type and the version of the aggregated discovery document that
// the client prefers. ok is false if the client prefers the plain documents.
func wantsAggregated(r *http.Request) (media, version string, ok bool) {
	for _, c := range endpoints.AcceptedClauses(r) {
		switch {
		case c.Params["as"] == "":
			return "", "", false
		case c.Params["as"] == aggregatedKind && c.Params["g"] == aggregatedGroup &&
			(c.Params["v"] == "v2" || c.Params["v"] == "v2beta1"):
			return c.Media, c.Params["v"], true
		}
	}
	return "", "", false
}

func (d *Documents) serveAggregated(w http.ResponseWriter, r *http.Request, a aggregated, media, version string) {
	w.Header().Set("ETag", a.etag)
	w.Header().Set("Cache-Control", "public")
	if r.Header.Get("If-None-Match") == a.etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	// v2 and v2beta1 have the same fields.
	list := *a.list
	list.TypeMeta = metav1.TypeMeta{APIVersion: aggregatedGroup + "/" + version, Kind: aggregatedKind}
	d.handler.WriteDocumentAs(w, r, &list, media,
		fmt.Sprintf(";g=%s;v=%s;as=%s", aggregatedGroup, version, aggregatedKind))
}

// storageHash returns the storageVersionHash of a kind in discovery documents; "" for virtual
// kinds. Kinds with the same hash share their stored objects.
func storageHash(k *api.Kind) string {
	if k.Serving.Virtual {
		return ""
	}
	return storageVersionHash(k.Storage.Hub.GVK)
}
