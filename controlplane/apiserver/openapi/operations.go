package openapi

import (
	"encoding/json"
	"slices"
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// operation describes an HTTP method of a path.
type operation struct {
	method    string // "get"
	id        string // "listAppsV1DeploymentForAllNamespaces"
	what      string // description for users
	tag       string // "apps_v1"
	action    string // x-kubernetes-action; "" = none
	gvk       schema.GroupVersionKind
	consumes  []string
	produces  []string
	params    []param
	body      object            // schema of the request body; nil = no body
	optional  bool              // the request body is optional
	answer    object            // schema of all successful responses; nil = no schema
	successes map[string]string // status codes and descriptions of successful responses
}

// Media types of requests and responses.
var (
	anyMedia    = []string{"*/*"}
	textMedia   = []string{"application/json", "application/yaml"}
	objectMedia = append(slices.Clone(textMedia), "application/vnd.kubernetes.protobuf", "application/cbor")
	logMedia    = append([]string{"text/plain"}, objectMedia...)
	watchMedia  = append(slices.Clone(objectMedia),
		"application/json;stream=watch", "application/vnd.kubernetes.protobuf;stream=watch", "application/cbor-seq")
)

// Status codes of successful responses, as in Kubernetes: updates and apply patches may create the
// object.
var (
	answered = map[string]string{"200": "OK"}
	created  = map[string]string{"200": "OK", "201": "Created", "202": "Accepted"}
	replaced = map[string]string{"200": "OK", "201": "Created"}
	deleted  = map[string]string{"200": "OK", "202": "Accepted"}
)

// encode returns the JSON of the operation. It omits ofPath, the parameters that the path declares.
func (d *document) encode(op *operation, ofPath []param) object {
	out := object{"operationId": op.id, "tags": []string{op.tag}}
	if op.what != "" {
		out["description"] = op.what
	}
	if op.action != "" {
		out["x-kubernetes-action"] = op.action
		out["x-kubernetes-group-version-kind"] = object{"group": op.gvk.Group, "version": op.gvk.Version, "kind": op.gvk.Kind}
	}
	var params []any
	for _, p := range op.params {
		if !slices.Contains(ofPath, p) {
			params = append(params, p.written(d.v3))
		}
	}
	answers := object{"401": object{"description": "Unauthorized"}}
	for code, what := range op.successes {
		answers[code] = d.answer(what, op)
	}
	out["responses"] = answers
	if d.v3 {
		if op.body != nil {
			body := object{"content": contents(op.consumes, op.body)}
			if !op.optional {
				body["required"] = true
			}
			out["requestBody"] = body
		}
	} else {
		if op.body != nil {
			body := object{"in": "body", "name": "body", "schema": op.body}
			if !op.optional {
				body["required"] = true
			}
			params = append(params, body)
		}
		out["schemes"] = []string{"https"}
		if op.consumes != nil {
			out["consumes"] = op.consumes
		}
		if op.produces != nil {
			out["produces"] = op.produces
		}
	}
	if len(params) > 0 {
		out["parameters"] = params
	}
	return out
}

func (d *document) answer(what string, op *operation) object {
	switch {
	case op.answer == nil:
		return object{"description": what}
	case d.v3:
		return object{"description": what, "content": contents(op.produces, op.answer)}
	}
	return object{"description": what, "schema": op.answer}
}

func contents(media []string, schema object) object {
	out := object{}
	for _, m := range media {
		out[m] = object{"schema": schema}
	}
	return out
}

// path adds a path with its operations. Parameters that all operations have become parameters of
// the path.
func (d *document) path(path string, ofPath []param, ops ...*operation) {
	if len(ops) == 0 {
		return
	}
	common := slices.Clone(ofPath)
	for _, p := range ops[0].params {
		if !slices.ContainsFunc(ops[1:], func(op *operation) bool { return !slices.Contains(op.params, p) }) {
			common = append(common, p)
		}
	}
	item := object{}
	for _, op := range ops {
		item[op.method] = d.encode(op, common)
	}
	if len(common) > 0 {
		written := make([]json.RawMessage, len(common))
		for i, p := range common {
			written[i] = p.written(d.v3)
		}
		item["parameters"] = written
	}
	d.paths[path] = item
}

// identifier returns text in camel case as part of an operation ID: letters, digits and
// underscores. capital makes the first letter upper case.
func identifier(text string, capital bool) string {
	var out strings.Builder
	for i, r := range text {
		if !unicode.IsLetter(r) && r != '_' && (i == 0 || !unicode.IsDigit(r)) {
			capital = true
			continue
		}
		if capital {
			r, capital = unicode.ToUpper(r), false
		}
		out.WriteRune(r)
	}
	return out.String()
}

// groupName returns the name of a group in operation IDs and tags.
func groupName(group string) string {
	if group == "" {
		return "core"
	}
	return strings.TrimSuffix(group, ".k8s.io")
}

// versionTag returns the tag of a group version's operations: "rbacAuthorization_v1".
func versionTag(gv schema.GroupVersion) string {
	return identifier(groupName(gv.Group), false) + "_" + identifier(gv.Version, false)
}

// operationID returns an operation ID: "list", "apps/v1" and "Deployment" give
// listAppsV1Deployment. For deletecollection, "Collection" follows the group version.
func operationID(verb string, gv schema.GroupVersion, rest string) string {
	if collection, ok := strings.CutPrefix(verb, "delete"); ok {
		verb, rest = "delete", collection+rest
	}
	return verb + identifier(groupName(gv.Group), true) + identifier(gv.Version, true) + identifier(rest, true)
}
