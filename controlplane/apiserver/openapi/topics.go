package openapi

import (
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
)

// topic is the subject of a piece: a kind, or a place, which is a path that is not a resource.
type topic struct {
	kind  *api.Kind
	place string // "version", "apis", "apis/apps", "apis/apps/v1"; "" for a kind
}

// name returns a unique name of the topic, by which topics are sorted.
func (t topic) name() string {
	if t.kind == nil {
		return t.place
	}
	return t.kind.GVK.String() + " " + t.kind.Resource
}

// root returns the path of the v3 document that contains the topic.
func (t topic) root() string {
	if t.kind == nil {
		return t.place
	}
	return root(t.kind)
}

var versionType = reflect.TypeFor[version.Info]()

const (
	versionPlace = "version"
	keysPlace    = "openid/v1/jwks"
	issuerPlace  = ".well-known/openid-configuration"
)

// topicsOf returns all topics of a table: its kinds and the places. Groups and versions of custom
// resources are not places, because Kubernetes describes only their resources.
func topicsOf(t *api.Table) []topic {
	places := []string{"api", "apis", versionPlace, keysPlace, issuerPlace}
	out := make([]topic, 0, len(t.Shown())+64)
	for _, k := range t.Shown() {
		out = append(out, topic{kind: k})
		if k.Model != nil {
			continue
		}
		places = append(places, root(k))
		if k.GVK.Group != "" {
			places = append(places, "apis/"+k.GVK.Group)
		}
	}
	slices.Sort(places)
	for _, place := range slices.Compact(places) {
		out = append(out, topic{place: place})
	}
	return out
}

// describedBy returns the topics of the document doc, for example "v2" or "v3/apis/apps/v1".
func describedBy(t *api.Table, doc string) []topic {
	where, v3 := strings.CutPrefix(strings.TrimSuffix(doc, ".pb"), "v3/")
	out := topicsOf(t)
	if v3 {
		out = slices.DeleteFunc(out, func(x topic) bool { return x.root() != where })
	}
	return out
}

// addPlace adds the operation of a place, such as the discovery document of a group.
func (d *document) addPlace(place string) {
	core := schema.GroupVersion{Version: "v1"}
	op := &operation{method: "get", consumes: objectMedia, produces: objectMedia, successes: answered}
	parts := strings.Split(place, "/")
	switch {
	case place == versionPlace:
		op.id, op.tag, op.what = "getCodeVersion", "version", "get the version of this server"
		op.consumes, op.produces, op.answer = textMedia[:1], textMedia[:1], d.ref(versionType)
	case place == keysPlace:
		op.id, op.tag, op.what = "getServiceAccountIssuerOpenIDKeyset", "openid", "get the keys of service account tokens"
		op.consumes, op.produces, op.answer = nil, []string{"application/jwk-set+json"}, object{"type": "string"}
	case place == issuerPlace:
		op.id, op.tag = "getServiceAccountIssuerOpenIDConfiguration", "WellKnown"
		op.what = "get the configuration of the service account issuer"
		op.consumes, op.produces, op.answer = nil, textMedia[:1], object{"type": "string"}
	case place == "api":
		op.id, op.tag, op.what = "getCoreAPIVersions", "core", "get available API versions"
		op.answer = d.top(&metav1.APIVersions{}, core.WithKind("APIVersions"))
	case place == "apis":
		op.id, op.tag, op.what = "getAPIVersions", "apis", "get available API groups"
		_ = d.top(&metav1.APIGroup{}, core.WithKind("APIGroup"))
		op.answer = d.top(&metav1.APIGroupList{}, core.WithKind("APIGroupList"))
	case len(parts) == 2 && parts[0] == "apis":
		gv := schema.GroupVersion{Group: parts[1]}
		op.id, op.tag = operationID("get", gv, "APIGroup"), identifier(groupName(gv.Group), false)
		op.what = "get the versions of a group"
		op.answer = d.top(&metav1.APIGroup{}, core.WithKind("APIGroup"))
	default:
		gv := schema.GroupVersion{Version: parts[len(parts)-1]}
		if len(parts) == 3 {
			gv.Group = parts[1]
		}
		op.id, op.tag, op.what = operationID("get", gv, "APIResources"), versionTag(gv), "get available resources"
		op.answer = d.top(&metav1.APIResourceList{}, core.WithKind("APIResourceList"))
	}
	d.path("/"+place+"/", nil, op)
}
