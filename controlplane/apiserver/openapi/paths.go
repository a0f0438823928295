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

// document collects the OpenAPI paths and schemas of one topic: a kind, or a path that is not a
// resource.
type document struct {
	*schemas
	paths object
}

// kindPaths adds the paths and operations of a kind to a document.
type kindPaths struct {
	*document
	kind        *api.Kind
	base        string // "/apis/apps/v1"
	scoped      string // path of the collection: "/apis/apps/v1/namespaces/{namespace}/deployments"
	scopeParams []param
	nameParams  []param
	media       []string // media types of responses with objects
	consumes    []string // media types of request bodies with objects
}

// addKind adds the paths, operations and schemas of a kind to the document.
func (d *document) addKind(k *api.Kind) {
	p := &kindPaths{document: d, kind: k, base: "/" + documentRoot(k), media: objectMedia, consumes: anyMedia}
	p.scoped = p.base + "/" + k.Resource
	p.nameParams = []param{{"path", "name", "string", "name of the " + k.GVK.Kind}}
	if k.Namespaced {
		p.scoped = p.base + "/namespaces/{namespace}/" + k.Resource
		p.scopeParams = []param{namespaceParam}
		p.nameParams = append(p.nameParams, namespaceParam)
	}
	if k.Schema.Model != nil { // custom resources have no protobuf or CBOR form here
		p.media, p.consumes = textMedia, textMedia
	}
	p.addCollection()
	p.addObject()
	p.addFacets()
	if k.Schema.Model == nil && p.supportsVerb("watch") {
		p.addWatches()
	}
}

// supportsVerb reports whether the kind supports a verb.
func (p *kindPaths) supportsVerb(verb string) bool {
	if p.kind.Serving.Verbs == nil {
		return !p.kind.Serving.Virtual
	}
	return slices.Contains(p.kind.Serving.Verbs, verb)
}

// newOperation returns an operation on the kind with the values that most operations have. suffix
// follows the kind in the operation ID.
func (p *kindPaths) newOperation(method, verb, suffix, action string) *operation {
	kind, scope := p.kind.GVK.Kind, p.scopeName()
	if strings.HasSuffix(suffix, forAllNamespaces) {
		scope = ""
	}
	return &operation{
		method: method, id: operationID(verb, p.kind.GVK.GroupVersion(), scope+kind+suffix),
		description: verb + " " + kind,
		tag:         versionTag(p.kind.GVK.GroupVersion()), action: action, gvk: p.kind.GVK,
		consumes: p.consumes, produces: p.media, successes: answered,
	}
}

const forAllNamespaces = "ForAllNamespaces"

// scopeName returns the part of operation IDs before the kind: "Namespaced" for namespaced kinds,
// otherwise "".
func (p *kindPaths) scopeName() string {
	if p.kind.Namespaced {
		return "Namespaced"
	}
	return ""
}

func (p *kindPaths) addCollection() {
	list := func(rest string) *operation {
		op := p.newOperation("get", "list", rest, "list")
		op.params, op.answer = listParams, p.listSchema(p.kind)
		if p.kind.Schema.Model == nil {
			op.produces = watchMedia
		}
		return op
	}
	var ops []*operation
	if p.supportsVerb("list") {
		if p.kind.Namespaced {
			p.addPath(p.base+"/"+p.kind.Resource, nil, list(forAllNamespaces))
		}
		ops = append(ops, list(""))
	}
	if p.supportsVerb("create") {
		op := p.newOperation("post", "create", "", "post")
		op.params, op.body, op.answer, op.successes = writeParams, p.bodySchema(p.kind), p.bodySchema(p.kind), created
		ops = append(ops, op)
	}
	if p.supportsVerb("deletecollection") {
		op := p.newOperation("delete", "deletecollection", "", "deletecollection")
		op.params, op.body, op.optional, op.answer = deleteCollectionParams, p.deleteOptions(), true, p.statusSchema()
		if p.kind.Schema.Model != nil {
			op.params, op.body = listParams, nil
		}
		ops = append(ops, op)
	}
	p.addPath(p.scoped, p.scopeParams, ops...)
}

func (p *kindPaths) addObject() {
	var ops []*operation
	if p.supportsVerb("get") {
		op := p.newOperation("get", "read", "", "get")
		op.params, op.answer = p.readParams(), p.bodySchema(p.kind)
		ops = append(ops, op)
	}
	if p.supportsVerb("update") {
		ops = append(ops, p.replaceOperation("", p.bodySchema(p.kind)))
	}
	if p.supportsVerb("patch") {
		ops = append(ops, p.patchOf("", p.bodySchema(p.kind)))
	}
	if p.supportsVerb("delete") {
		op := p.newOperation("delete", "delete", "", "delete")
		op.params, op.body, op.optional, op.answer, op.successes = deleteParams, p.deleteOptions(), true,
			p.statusSchema(), deleted
		if p.kind.Deletion.ReturnsDeleted {
			op.answer = p.bodySchema(p.kind)
		}
		ops = append(ops, op)
	}
	p.addPath(p.scoped+"/{name}", p.nameParams, ops...)
}

// readParams returns the parameters of a get.
func (p *kindPaths) readParams() []param {
	if p.kind.Schema.Model != nil {
		return []param{prettyParam, resourceVersionParam}
	}
	return []param{prettyParam}
}

func (p *kindPaths) replaceOperation(facet string, body object) *operation {
	op := p.newOperation("put", "replace", facet, "put")
	op.params, op.body, op.answer, op.successes = writeParams, body, body, replaced
	return op
}

func (p *kindPaths) patchOf(facet string, response object) *operation {
	op := p.newOperation("patch", "patch", facet, "patch")
	op.params, op.body, op.answer, op.successes, op.consumes = patchParams, p.patchSchema(), response, replaced, nil
	if p.kind.Schema.Model != nil {
		op.successes = answered
	}
	for _, t := range p.kind.SupportedPatchTypes() {
		op.consumes = append(op.consumes, string(t))
	}
	if p.kind.Schema.Model == nil {
		op.consumes = append(op.consumes, string(types.ApplyCBORPatchType))
	}
	return op
}

// addWatches adds the deprecated watch paths below /watch.
func (p *kindPaths) addWatches() {
	watch := func(path, rest, action string, ofPath []param) {
		op := p.newOperation("get", "watch", rest, action)
		op.params, op.answer, op.produces = listParams, p.watchEvent(), watchMedia
		p.addPath(p.base+"/watch"+strings.TrimPrefix(path, p.base), ofPath, op)
	}
	if p.kind.Namespaced {
		watch(p.base+"/"+p.kind.Resource, "List"+forAllNamespaces, "watchlist", nil)
	}
	watch(p.scoped, "List", "watchlist", p.scopeParams)
	watch(p.scoped+"/{name}", "", "watch", p.nameParams)
}

// connections are the subresources that connect to another process (exec, proxy and similar), with
// their HTTP methods.
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
	body := p.bodySchema(p.kind)
	if sub.New != nil {
		body = p.rootTypeRef(sub.New(), sub.GVK)
	}
	var ops []*operation
	for _, verb := range sub.Verbs {
		var op *operation
		switch verb {
		case "get":
			op = p.newOperation("get", "read", title, "get")
			op.params, op.answer = p.readParams(), body
			if name == "log" {
				op.params = append([]param{prettyParam}, optionParams()["PodLogOptions"]...)
				op.produces, op.answer = logMedia, object{"type": "string"}
			}
		case "update":
			op = p.replaceOperation(title, body)
		case "patch":
			op = p.patchOf(title, body)
		case "create":
			op = p.newOperation("post", "create", title, "post")
			op.params, op.body, op.answer, op.successes = writeParams, body, body, created
		default:
			continue
		}
		if !sub.GVK.Empty() && p.kind.Schema.Model == nil {
			op.gvk = sub.GVK
		}
		ops = append(ops, op)
	}
	p.addPath(p.scoped+"/{name}/"+name, p.nameParams, ops...)
}

// addConnection adds the operations of a subresource that connects to another process.
func (p *kindPaths) addConnection(name string) {
	gvk := p.kind.Subresources[name].GVK
	ofName := slices.Clone(p.nameParams)
	ofName[0].description = "name of the " + gvk.Kind
	all := func(suffix string) (ops []*operation) {
		for _, method := range connections[name] {
			method = strings.ToLower(method)
			verb := strings.ToUpper(method[:1]) + method[1:]
			rest := strings.ToUpper(name[:1]) + name[1:] + suffix
			op := p.newOperation(method, "connect", rest, "connect")
			op.id = operationID("connect", p.kind.GVK.GroupVersion(), verb+p.scopeName()+p.kind.GVK.Kind+rest)
			op.gvk, op.params, op.answer = gvk, optionParams()[gvk.Kind], object{"type": "string"}
			op.consumes, op.produces = anyMedia, anyMedia
			ops = append(ops, op)
		}
		return ops
	}
	path := p.scoped + "/{name}/" + name
	p.addPath(path, ofName, all("")...)
	if name == "proxy" {
		p.addPath(path+"/{path}", append(ofName, pathParam), all("WithPath")...)
	}
}

func (d *document) statusSchema() object {
	return d.rootTypeRef(&metav1.Status{}, schema.GroupVersionKind{Version: "v1", Kind: "Status"})
}

func (d *document) patchSchema() object { return d.typeRef(reflect.TypeFor[metav1.Patch]()) }

// deleteOptions returns a reference to the schema of DeleteOptions, the body of a delete.
func (p *kindPaths) deleteOptions() object {
	return p.commonSchema(&metav1.DeleteOptions{}, "DeleteOptions")
}

// watchEvent returns a reference to the schema of watch events.
func (p *kindPaths) watchEvent() object { return p.commonSchema(&metav1.WatchEvent{}, "WatchEvent") }

// commonSchema returns a reference to the schema of a type that all group versions share, such as
// DeleteOptions. For built-in kinds it also registers the type as a kind of their group version.
func (p *kindPaths) commonSchema(obj runtime.Object, kind string) object {
	if p.kind.Schema.Model == nil {
		p.rootTypeRef(obj, p.kind.GVK.GroupVersion().WithKind(kind))
	}
	return p.rootTypeRef(obj, schema.GroupVersionKind{Version: "v1", Kind: kind})
}
