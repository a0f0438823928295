package openapi

import (
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// document collects the OpenAPI paths and schemas of one kind or discovery path.
type document struct {
	*schemas
	paths object
}

// kindPaths adds the paths and operations of a kind to a document.
type kindPaths struct {
	*document
	kind    *api.Kind
	base    string // "/apis/apps/v1"
	scoped  string // path of the collection: "/apis/apps/v1/namespaces/{namespace}/deployments"
	ofScope []param
	ofName  []param
	media   []string // media types of responses with objects
	takes   []string // media types of request bodies with objects
}

// add adds the paths, operations and schemas of a kind.
func (d *document) add(k *api.Kind) {
	p := &kindPaths{document: d, kind: k, base: "/" + root(k), media: objectMedia, takes: anyMedia}
	p.scoped = p.base + "/" + k.Resource
	p.ofName = []param{{"path", "name", "string", "name of the " + k.GVK.Kind}}
	if k.Namespaced {
		p.scoped = p.base + "/namespaces/{namespace}/" + k.Resource
		p.ofScope = []param{namespaceParam}
		p.ofName = append(p.ofName, namespaceParam)
	}
	if k.Model != nil { // custom resources have no protobuf or CBOR form here
		p.media, p.takes = textMedia, textMedia
	}
	p.addCollection()
	p.addObject()
	p.addFacets()
	if k.Model == nil && p.serves("watch") {
		p.addWatches()
	}
}

// serves reports whether the kind supports a verb.
func (p *kindPaths) serves(verb string) bool {
	if p.kind.Verbs == nil {
		return !p.kind.Virtual
	}
	return slices.Contains(p.kind.Verbs, verb)
}

// operation returns an operation on the kind with common values. rest follows the kind in the
// operation ID.
func (p *kindPaths) operation(method, verb, rest, action string) *operation {
	kind, scope := p.kind.GVK.Kind, p.scope()
	if strings.HasSuffix(rest, forAllNamespaces) {
		scope = ""
	}
	return &operation{
		method: method, id: operationID(verb, p.kind.GVK.GroupVersion(), scope+kind+rest), what: verb + " " + kind,
		tag: versionTag(p.kind.GVK.GroupVersion()), action: action, gvk: p.kind.GVK,
		consumes: p.takes, produces: p.media, successes: answered,
	}
}

const forAllNamespaces = "ForAllNamespaces"

// scope returns "Namespaced" for namespaced kinds, the part of operation IDs before the kind.
func (p *kindPaths) scope() string {
	if p.kind.Namespaced {
		return "Namespaced"
	}
	return ""
}

func (p *kindPaths) addCollection() {
	list := func(rest string) *operation {
		op := p.operation("get", "list", rest, "list")
		op.params, op.answer = listParams, p.list(p.kind)
		if p.kind.Model == nil {
			op.produces = watchMedia
		}
		return op
	}
	var ops []*operation
	if p.serves("list") {
		if p.kind.Namespaced {
			p.path(p.base+"/"+p.kind.Resource, nil, list(forAllNamespaces))
		}
		ops = append(ops, list(""))
	}
	if p.serves("create") {
		op := p.operation("post", "create", "", "post")
		op.params, op.body, op.answer, op.successes = writeParams, p.body(p.kind), p.body(p.kind), created
		ops = append(ops, op)
	}
	if p.serves("deletecollection") {
		op := p.operation("delete", "deletecollection", "", "deletecollection")
		op.params, op.body, op.optional, op.answer = deleteCollectionParams, p.deleteOptions(), true, p.status()
		if p.kind.Model != nil {
			op.params, op.body = listParams, nil
		}
		ops = append(ops, op)
	}
	p.path(p.scoped, p.ofScope, ops...)
}

func (p *kindPaths) addObject() {
	var ops []*operation
	if p.serves("get") {
		op := p.operation("get", "read", "", "get")
		op.params, op.answer = p.readParams(), p.body(p.kind)
		ops = append(ops, op)
	}
	if p.serves("update") {
		ops = append(ops, p.replace("", p.body(p.kind)))
	}
	if p.serves("patch") {
		ops = append(ops, p.patchOf("", p.body(p.kind)))
	}
	if p.serves("delete") {
		op := p.operation("delete", "delete", "", "delete")
		op.params, op.body, op.optional, op.answer, op.successes = deleteParams, p.deleteOptions(), true, p.status(), deleted
		if p.kind.ReturnsDeleted {
			op.answer = p.body(p.kind)
		}
		ops = append(ops, op)
	}
	p.path(p.scoped+"/{name}", p.ofName, ops...)
}

// readParams returns the parameters of a get.
func (p *kindPaths) readParams() []param {
	if p.kind.Model != nil {
		return []param{prettyParam, resourceVersionParam}
	}
	return []param{prettyParam}
}

func (p *kindPaths) replace(facet string, body object) *operation {
	op := p.operation("put", "replace", facet, "put")
	op.params, op.body, op.answer, op.successes = writeParams, body, body, replaced
	return op
}

func (p *kindPaths) patchOf(facet string, answer object) *operation {
	op := p.operation("patch", "patch", facet, "patch")
	op.params, op.body, op.answer, op.successes, op.consumes = patchParams, p.patch(), answer, replaced, nil
	if p.kind.Model != nil {
		op.successes = answered
	}
	for _, t := range p.kind.Patches() {
		op.consumes = append(op.consumes, string(t))
	}
	if p.kind.Model == nil {
		op.consumes = append(op.consumes, string(types.ApplyCBORPatchType))
	}
	return op
}

// addWatches adds the deprecated watch paths below /watch.
func (p *kindPaths) addWatches() {
	watch := func(path, rest, action string, ofPath []param) {
		op := p.operation("get", "watch", rest, action)
		op.params, op.answer, op.produces = listParams, p.watchEvent(), watchMedia
		p.path(p.base+"/watch"+strings.TrimPrefix(path, p.base), ofPath, op)
	}
	if p.kind.Namespaced {
		watch(p.base+"/"+p.kind.Resource, "List"+forAllNamespaces, "watchlist", nil)
	}
	watch(p.scoped, "List", "watchlist", p.ofScope)
	watch(p.scoped+"/{name}", "", "watch", p.ofName)
}

// connections are the subresources that stream to another process, with their HTTP methods.
var connections = map[string][]string{
	"attach": {http.MethodGet, http.MethodPost}, "exec": {http.MethodGet, http.MethodPost},
	"portforward": {http.MethodGet, http.MethodPost},
	"proxy": {
		http.MethodDelete, http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodPatch,
		http.MethodPost, http.MethodPut,
	},
}

func (p *kindPaths) addFacets() {
	for _, name := range slices.Sorted(maps.Keys(p.kind.Subresources)) {
		if connections[name] != nil {
			p.addConnection(name)
			continue
		}
		p.addFacet(name)
	}
}

func (p *kindPaths) addFacet(name string) {
	sub, title := p.kind.Subresources[name], strings.ToUpper(name[:1])+name[1:]
	body := p.body(p.kind)
	if sub.New != nil {
		body = p.top(sub.New(), sub.GVK)
	}
	var ops []*operation
	for _, verb := range sub.Verbs {
		var op *operation
		switch verb {
		case "get":
			op = p.operation("get", "read", title, "get")
			op.params, op.answer = p.readParams(), body
			if name == "log" {
				op.params = append([]param{prettyParam}, optionParams()["PodLogOptions"]...)
				op.produces, op.answer = logMedia, object{"type": "string"}
			}
		case "update":
			op = p.replace(title, body)
		case "patch":
			op = p.patchOf(title, body)
		case "create":
			op = p.operation("post", "create", title, "post")
			op.params, op.body, op.answer, op.successes = writeParams, body, body, created
		default:
			continue
		}
		if !sub.GVK.Empty() && p.kind.Model == nil {
			op.gvk = sub.GVK
		}
		ops = append(ops, op)
	}
	p.path(p.scoped+"/{name}/"+name, p.ofName, ops...)
}

// addConnection adds the operations of a subresource that streams to another process.
func (p *kindPaths) addConnection(name string) {
	gvk := p.kind.Subresources[name].GVK
	ofName := slices.Clone(p.ofName)
	ofName[0].what = "name of the " + gvk.Kind
	all := func(suffix string) (ops []*operation) {
		for _, method := range connections[name] {
			method = strings.ToLower(method)
			verb := strings.ToUpper(method[:1]) + method[1:]
			rest := strings.ToUpper(name[:1]) + name[1:] + suffix
			op := p.operation(method, "connect", rest, "connect")
			op.id = operationID("connect", p.kind.GVK.GroupVersion(), verb+p.scope()+p.kind.GVK.Kind+rest)
			op.gvk, op.params, op.answer = gvk, optionParams()[gvk.Kind], object{"type": "string"}
			op.consumes, op.produces = anyMedia, anyMedia
			ops = append(ops, op)
		}
		return ops
	}
	path := p.scoped + "/{name}/" + name
	p.path(path, ofName, all("")...)
	if name == "proxy" {
		p.path(path+"/{path}", append(ofName, pathParam), all("WithPath")...)
	}
}

func (d *document) status() object {
	return d.top(&metav1.Status{}, schema.GroupVersionKind{Version: "v1", Kind: "Status"})
}

func (d *document) patch() object { return d.ref(reflect.TypeFor[metav1.Patch]()) }

// deleteOptions returns a reference to the schema of DeleteOptions, the body of a delete.
func (p *kindPaths) deleteOptions() object { return p.common(&metav1.DeleteOptions{}, "DeleteOptions") }

// watchEvent returns a reference to the schema of watch events.
func (p *kindPaths) watchEvent() object { return p.common(&metav1.WatchEvent{}, "WatchEvent") }

// common returns a reference to the schema of a type that all group versions share, such as
// DeleteOptions. For built-in kinds it also registers the type as a kind of their group version.
func (p *kindPaths) common(obj runtime.Object, kind string) object {
	if p.kind.Model == nil {
		p.top(obj, p.kind.GVK.GroupVersion().WithKind(kind))
	}
	return p.top(obj, schema.GroupVersionKind{Version: "v1", Kind: kind})
}
