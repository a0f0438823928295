// Package redact removes possible secrets from objects and texts before they are shared in a
// support bundle. It does no I/O. In doubt it removes a value. An object keeps only values that are
// known not to be secret. A text loses all parts that look like a key, a token or a password.
package redact

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Mask is the text that replaces a removed value.
const Mask = "(left out)"

var looks = []struct {
	is   *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(-----END [A-Z0-9 ]*PRIVATE KEY-----|$)`), Mask},
	{regexp.MustCompile(`(?i)AGE-SECRET-KEY-[A-Z0-9-]+`), Mask},
	{regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?`), Mask}, // a JWT
	{regexp.MustCompile(`keelson1\.[a-z]+\.[A-Za-z0-9._~+/=-]+`), Mask},                   // a join token
	{regexp.MustCompile(`\b(AKIA|ASIA)[A-Z0-9]{12,}\b`), Mask},
	{regexp.MustCompile(`\b(gh[pousr]_|glpat-|xox[abprs]-|sk-)[A-Za-z0-9_-]{10,}`), Mask},
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}`), "$1 " + Mask},
	{regexp.MustCompile(`([a-z][a-z0-9+.-]*://)[^/\s:@"']*:[^/\s@"']+@`), "${1}" + Mask + "@"}, // a password in a URL
	{regexp.MustCompile(`(?i)([?&](?:x-amz-[a-z-]*|sig|signature|key|token)=)[^&\s"']+`), "${1}" + Mask},
	{
		regexp.MustCompile(
			`(?i)((?:pass(?:word|wd|phrase)?|pwd|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credentials?|authorization|cookie)[a-z0-9_.-]*\\?["']?\s*(?:=|:)\s*)(\\?"[^"]*"?|'[^']*'?|[^\s,;"'}]+)`), "${1}" + Mask},
	{
		regexp.MustCompile(
			`(?i)(--?[a-z-]*(?:password|passwd|secret|token|api-?key|access-?key|credentials?)\s+)("[^"]*"|'[^']*'|[^\s"',]+)`), "${1}" + Mask},
}

// Text returns s without the parts that look like a key, a token or a password. Each such part is
// replaced by Mask.
func Text(s string) string {
	for _, l := range looks {
		s = l.is.ReplaceAllString(s, l.with)
	}
	return s
}

// secretNames are names of object fields. The function JSON replaces the value of such a field with
// Mask, at any depth of the object.
var secretNames = []string{"data", "stringData", "binaryData", "caBundle", "token", "password", "username",
	"volumeAttributes",
	"httpHeaders", "options", "extra", "parameters", "last-applied-configuration", "managedFields", "opaqueParameters",
	"patch", "request"}

// JSON returns the redacted form of raw, the JSON of an object or of a list of objects. It replaces
// the content of Secrets and ConfigMaps, the values of environment variables, commands, arguments,
// unknown annotations, headers and parameters. It applies Text to all other strings.
func JSON(raw []byte) ([]byte, error) {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return nil, fmt.Errorf("removing secrets from the response: it is not valid JSON: %w", err)
	}
	return json.MarshalIndent(redactValue("", v), "", " ")
}

func redactValue(name string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		if k, _ := v["kind"].(string); k == "Secret" || k == "ConfigMap" {
			return map[string]any{"kind": k, "metadata": Mask}
		}
		for key, of := range v {
			v[key] = redactField(key, of)
		}
		return v
	case []any:
		for i, one := range v {
			v[i] = redactValue(name, one)
		}
		return v
	case string:
		return Text(v)
	}
	return v
}

// redactField returns the redacted form of value, the value of an object's field. key is the name
// of the field.
func redactField(key string, value any) any {
	switch {
	case slices.Contains(secretNames, key):
		return Mask
	case key == "command" || key == "args":
		if words, ok := value.([]any); ok {
			return fmt.Sprintf("(%d words left out)", len(words))
		}
	case key == "env":
		return redactEnvironment(value)
	case key == "annotations":
		return redactAnnotations(value)
	}
	return redactValue(key, value)
}

// redactEnvironment returns the redacted form of value, a container's env field. It keeps the names
// of the variables and the sources of their values (valueFrom), but no values.
func redactEnvironment(value any) any {
	list, ok := value.([]any)
	if !ok {
		return Mask
	}
	for i, one := range list {
		e, _ := one.(map[string]any)
		kept := map[string]any{"name": e["name"]}
		if e["valueFrom"] != nil {
			kept["valueFrom"] = redactValue("", e["valueFrom"])
		}
		if e["value"] != nil {
			kept["value"] = Mask
		}
		list[i] = kept
	}
	return list
}

// isKnownAnnotation reports whether Keelson or Kubernetes sets annotations with this key, so that
// the value of the annotation is not a secret.
func isKnownAnnotation(key string) bool {
	prefix, name, _ := strings.Cut(key, "/")
	return prefix == "keelson.dev" || prefix == "deployment.kubernetes.io" || prefix == "pv.kubernetes.io" ||
		prefix == "volume.kubernetes.io" || prefix == "node.alpha.kubernetes.io" ||
		prefix == "kubernetes.io" && strings.HasPrefix(name, "config.")
}

func redactAnnotations(of any) any {
	m, ok := of.(map[string]any)
	if !ok {
		return Mask
	}
	for key, v := range m {
		if s, text := v.(string); text && isKnownAnnotation(key) {
			m[key] = Text(s)
		} else {
			m[key] = Mask
		}
	}
	return m
}
