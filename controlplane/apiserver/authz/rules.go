package authz

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// allowsAttributes reports whether one rule allows the request.
func allowsAttributes(rule *rbacv1.PolicyRule, a *Attributes) bool {
	if !containsOrAll(rule.Verbs, a.Verb) {
		return false
	}
	if a.Resource == "" {
		return pathMatches(rule.NonResourceURLs, a.Path)
	}
	return containsOrAll(rule.APIGroups, a.APIGroup) && resourceMatches(rule.Resources, a.Resource, a.Subresource) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, a.Name))
}

// containsOrAll reports whether list contains v or "*".
func containsOrAll(list []string, v string) bool {
	for _, x := range list {
		if x == v || x == "*" {
			return true
		}
	}
	return false
}

// resourceMatches reports whether list contains the resource. Entries are "pods", "pods/log",
// "*/scale" or "*".
func resourceMatches(list []string, resource, subresource string) bool {
	for _, x := range list {
		if x == "*" {
			return true
		}
		if subresource == "" {
			if x == resource {
				return true
			}
			continue
		}
		r, s, ok := strings.Cut(x, "/")
		if ok && s == subresource && (r == resource || r == "*") {
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

// Uncovered returns the parts of requested that granted does not grant. Each part has one verb, one
// group and one resource. The result is empty if granted covers everything.
func Uncovered(granted, requested []rbacv1.PolicyRule) []rbacv1.PolicyRule {
	var missing []rbacv1.PolicyRule
	for i := range requested {
		for _, part := range splitRule(&requested[i]) {
			if !slices.ContainsFunc(granted, func(h rbacv1.PolicyRule) bool { return coversRule(&h, &part) }) {
				missing = append(missing, part)
			}
		}
	}
	return missing
}

// splitRule splits a rule into equivalent rules that have a single value in each field.
func splitRule(r *rbacv1.PolicyRule) []rbacv1.PolicyRule {
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

// coversRule reports whether rule h grants everything that part grants. part has a single value in
// each field.
func coversRule(h, part *rbacv1.PolicyRule) bool {
	if !containsOrAll(h.Verbs, part.Verbs[0]) {
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
	if !containsOrAll(h.APIGroups, part.APIGroups[0]) || !resourceMatches(h.Resources, resource, sub) {
		return false
	}
	return len(h.ResourceNames) == 0 || len(part.ResourceNames) > 0 &&
		slices.Contains(h.ResourceNames, part.ResourceNames[0])
}
