package openapi

import (
	"encoding/json"
	"slices"
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// operation describes one operation of an OpenAPI path, that is, an HTTP method.
type operation struct {
	method      string // "get"
	id          string // "listAppsV1DeploymentForAllNamespaces"
	description string // description for users
	tag         string // "apps_v1"
	action      string // x-kubernetes-action; "" = none
	gvk         schema.GroupVersionKind
	consumes    []string
	produces    []string
	params      []param
	body        object            // schema of the request body; nil = no body
	optional    bool              // the request body is optional
	answer      object            // schema of all successful responses; nil = no schema
	successes   map[string]string // status codes and descriptions of successful responses
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

// encodeOperation returns the operation as a JSON object. It omits the parameters in ofPath, which
// the path declares for all of its operations.
func (d *document) encodeOperation(op *operation, ofPath []param) object {
	out := object{"operationId": op.id, "tags": []string{op.tag}}
	if op.description != "" {
		out["description"] = op.description
	}
	if op.action != "" {
		out["x-kubernetes-action"] = op.action
		out["x-kubernetes-group-version-kind"] = object{"group": op.gvk.Group, "version": op.gvk.Version,
			"kind": op.gvk.Kind}
	}
	var params []any
	for _, p := range op.params {
		if !slices.Contains(ofPath, p) {
			params = append(params, p.writeParam(d.v3))
		}
	}
	answers := object{"401": object{"description": "Unauthorized"}}
	for code, what := range op.successes {
		answers[code] = d.responseObject(what, op)
	}
	out["responses"] = answers
	if d.v3 {
		if op.body != nil {
			body := object{"content": contentObject(op.consumes, op.body)}
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

func (d *document) responseObject(description string, op *operation) object {
	switch {
	case op.answer == nil:
		return object{"description": description}
	case d.v3:
		return object{"description": description, "content": contentObject(op.produces, op.answer)}
	}
	return object{"description": description, "schema": op.answer}
}

func contentObject(media []string, mediaSchema object) object {
	out := object{}
	for _, m := range media {
		out[m] = object{"schema": mediaSchema}
	}
	return out
}

// addPath adds a path with its operations. ofPath are the parameters in the path itself. Parameters
// that all operations have also become parameters of the path.
func (d *document) addPath(path string, ofPath []param, ops ...*operation) {
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
		item[op.method] = d.encodeOperation(op, common)
	}
	if len(common) > 0 {
		written := make([]json.RawMessage, len(common))
		for i, p := range common {
			written[i] = p.writeParam(d.v3)
		}
		item["parameters"] = written
	}
	d.paths[path] = item
}

// camelCase returns text in camel case as a part of an operation ID: letters, digits and
// underscores. If capital is true, the first letter is upper case.
func camelCase(text string, capital bool) string {
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

// groupName returns the name of an API group as it appears in operation IDs and tags.
func groupName(group string) string {
	if group == "" {
		return "core"
	}
	return strings.TrimSuffix(group, ".k8s.io")
}

// versionTag returns the tag of a group version's operations: "rbacAuthorization_v1".
func versionTag(gv schema.GroupVersion) string {
	return camelCase(groupName(gv.Group), false) + "_" + camelCase(gv.Version, false)
}

// operationID returns an operation ID: "list", "apps/v1" and "Deployment" give
// listAppsV1Deployment. For the verb deletecollection, "Collection" follows the group version.
func operationID(verb string, gv schema.GroupVersion, suffix string) string {
	if collection, ok := strings.CutPrefix(verb, "delete"); ok {
		verb, suffix = "delete", collection+suffix
	}
	return verb + camelCase(groupName(gv.Group), true) + camelCase(gv.Version, true) + camelCase(suffix, true)
}
