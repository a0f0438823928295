package authz

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// allows says whether one rule allows what is asked.
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

// has says whether list names v or everything.
func has(list []string, v string) bool {
	for _, x := range list {
		if x == v || x == "*" {
			return true
		}
	}
	return false
}

// resourceMatches knows "pods", "pods/log", "*/scale" and "*".
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

// pathMatches knows "/healthz", "/apis/*" and "*".
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

// Uncovered returns the parts of wanted that held does not grant, each with one
// verb, group and resource; empty when held covers everything.
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

// split breaks a rule into rules of one value each.
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

// covers says whether rule h grants all of part, a rule of one value each.
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
