// Package redact takes out of objects and texts what may be a secret, for what is shown to strangers. It is pure. It rather
// takes out too much: of an object it leaves what is known to say nothing of that kind, and of a text it takes out what looks
// like a key, a token or a password.
package redact

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Out stands where something was taken out.
const Out = "(left out)"

var looks = []struct {
	is   *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(-----END [A-Z0-9 ]*PRIVATE KEY-----|$)`), Out},
	{regexp.MustCompile(`(?i)AGE-SECRET-KEY-[A-Z0-9-]+`), Out},
	{regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?`), Out}, // a JWT
	{regexp.MustCompile(`keelson1\.[a-z]+\.[A-Za-z0-9._~+/=-]+`), Out},                   // a join token
	{regexp.MustCompile(`\b(AKIA|ASIA)[A-Z0-9]{12,}\b`), Out},
	{regexp.MustCompile(`\b(gh[pousr]_|glpat-|xox[abprs]-|sk-)[A-Za-z0-9_-]{10,}`), Out},
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}`), "$1 " + Out},
	{regexp.MustCompile(`([a-z][a-z0-9+.-]*://)[^/\s:@"']*:[^/\s@"']+@`), "${1}" + Out + "@"}, // a password in a URL
	{regexp.MustCompile(`(?i)([?&](?:x-amz-[a-z-]*|sig|signature|key|token)=)[^&\s"']+`), "${1}" + Out},
	{regexp.MustCompile(`(?i)((?:pass(?:word|wd|phrase)?|pwd|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credentials?|authorization|cookie)[a-z0-9_.-]*\\?["']?\s*(?:=|:)\s*)(\\?"[^"]*"?|'[^']*'?|[^\s,;"'}]+)`), "${1}" + Out},
	{regexp.MustCompile(`(?i)(--?[a-z-]*(?:password|passwd|secret|token|api-?key|access-?key|credentials?)\s+)("[^"]*"|'[^']*'|[^\s"',]+)`), "${1}" + Out},
}

// Text takes out of a text what looks like a secret.
func Text(s string) string {
	for _, l := range looks {
		s = l.is.ReplaceAllString(s, l.with)
	}
	return s
}

// secretNames are fields whose content is none of a stranger's business, wherever they stand.
var secretNames = []string{"data", "stringData", "binaryData", "caBundle", "token", "password", "username", "volumeAttributes",
	"httpHeaders", "options", "extra", "parameters", "last-applied-configuration", "managedFields", "opaqueParameters", "patch", "request"}

// JSON takes out of an object, or a list of them, what may be a secret: the whole content of Secrets and ConfigMaps; values of
// environments, commands and arguments, annotations that are not known, headers, parameters; and of every text what Text
// takes out.
func JSON(raw []byte) ([]byte, error) {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return nil, fmt.Errorf("redacting: %w", err)
	}
	return json.MarshalIndent(value("", v), "", " ")
}

func value(name string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		if k, _ := v["kind"].(string); k == "Secret" || k == "ConfigMap" {
			return map[string]any{"kind": k, "metadata": Out}
		}
		for key, of := range v {
			v[key] = field(key, of)
		}
		return v
	case []any:
		for i, one := range v {
			v[i] = value(name, one)
		}
		return v
	case string:
		return Text(v)
	}
	return v
}

// field is what is left of a field of an object.
func field(key string, of any) any {
	switch {
	case slices.Contains(secretNames, key):
		return Out
	case key == "command" || key == "args":
		if words, ok := of.([]any); ok {
			return fmt.Sprintf("(%d words left out)", len(words))
		}
	case key == "env":
		return environment(of)
	case key == "annotations":
		return annotations(of)
	}
	return value(key, of)
}

// environment leaves the names of variables, and where they come from.
func environment(of any) any {
	list, ok := of.([]any)
	if !ok {
		return Out
	}
	for i, one := range list {
		e, _ := one.(map[string]any)
		kept := map[string]any{"name": e["name"]}
		if e["valueFrom"] != nil {
			kept["valueFrom"] = value("", e["valueFrom"])
		}
		if e["value"] != nil {
			kept["value"] = Out
		}
		list[i] = kept
	}
	return list
}

// known are annotations whose values are no secrets: those of the cluster itself.
func known(key string) bool {
	prefix, name, _ := strings.Cut(key, "/")
	return prefix == "keelson.dev" || prefix == "deployment.kubernetes.io" || prefix == "pv.kubernetes.io" ||
		prefix == "volume.kubernetes.io" || prefix == "node.alpha.kubernetes.io" || prefix == "kubernetes.io" && strings.HasPrefix(name, "config.")
}

func annotations(of any) any {
	m, ok := of.(map[string]any)
	if !ok {
		return Out
	}
	for key, v := range m {
		if s, text := v.(string); text && known(key) {
			m[key] = Text(s)
		} else {
			m[key] = Out
		}
	}
	return m
}
