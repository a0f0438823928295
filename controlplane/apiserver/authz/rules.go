package authz

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// allows reports whether one rule allows the request.
func allows(rule *rbacv1.PolicyRule, a *Attributes) bool {
	if !has(rule.Verbs, a.Verb) {
		return false
	}
	if a.Resource == "" {
		return pathMatches(rule.NonResourceURLs, a.Path)
	}
	return has(rule.APIGroups, a.APIGroup) && resourceMatches(rule.Resources, a.Resource, a.Subresource) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, a.Name))
}

// has reports whether list contains v or "*".
func has(list []string, v string) bool {
	for _, x := range list {
		if x == v || x == "*" {
			return true
		}
	}
	return false
}

// resourceMatches reports whether list contains the resource. Entries are "pods", "pods/log",
// "*/scale" or "*".
func resourceMatches(list []string, resource, sub string) bool {
	for _, x := range list {
		if x == "*" {
			return true
		}
		if sub == "" {
			if x == resource {
				return true
			}
			continue
		}
		r, s, ok := strings.Cut(x, "/")
		if ok && s == sub && (r == resource || r == "*") {
			return true
		}
	}
	return false
}

// pathMatches reports whether list contains the path. Entries are "/healthz", "/apis/*" or "*".
func pathMatches(list []string, path string) bool {
	for _, x := range list {
		if x == "*" || x == path {
			return true
		}
		if prefix, ok := strings.CutSuffix(x, "*"); ok && strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

// Uncovered returns the parts of wanted that held does not grant, each with one verb, group and
// resource. It is empty when held covers everything.
func Uncovered(held, wanted []rbacv1.PolicyRule) []rbacv1.PolicyRule {
	var missing []rbacv1.PolicyRule
	for i := range wanted {
		for _, part := range split(&wanted[i]) {
			if !slices.ContainsFunc(held, func(h rbacv1.PolicyRule) bool { return covers(&h, &part) }) {
				missing = append(missing, part)
			}
		}
	}
	return missing
}

// split returns the equivalent rules with a single value in each field.
func split(r *rbacv1.PolicyRule) []rbacv1.PolicyRule {
	var out []rbacv1.PolicyRule
	for _, verb := range r.Verbs {
		for _, url := range r.NonResourceURLs {
			out = append(out, rbacv1.PolicyRule{Verbs: []string{verb}, NonResourceURLs: []string{url}})
		}
		for _, group := range r.APIGroups {
			for _, res := range r.Resources {
				one := rbacv1.PolicyRule{Verbs: []string{verb}, APIGroups: []string{group}, Resources: []string{res}}
				if len(r.ResourceNames) == 0 {
					out = append(out, one)
				}
				for _, name := range r.ResourceNames {
					named := one
					named.ResourceNames = []string{name}
					out = append(out, named)
				}
			}
		}
	}
	return out
}

// covers reports whether rule h grants everything in part, a rule with a single value in each
// field.
func covers(h, part *rbacv1.PolicyRule) bool {
	if !has(h.Verbs, part.Verbs[0]) {
		return false
	}
	if len(part.NonResourceURLs) > 0 {
		want := part.NonResourceURLs[0]
		return slices.ContainsFunc(h.NonResourceURLs, func(x string) bool {
			prefix, star := strings.CutSuffix(x, "*")
			return x == want || star && strings.HasPrefix(want, prefix)
		})
	}
	resource, sub, _ := strings.Cut(part.Resources[0], "/")
	if !has(h.APIGroups, part.APIGroups[0]) || !resourceMatches(h.Resources, resource, sub) {
		return false
	}
	return len(h.ResourceNames) == 0 || len(part.ResourceNames) > 0 && slices.Contains(h.ResourceNames, part.ResourceNames[0])
}
