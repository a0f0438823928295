package flowcontrol

import (
	"cmp"
	"slices"
	"strings"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Request contains the attributes of a request that FlowSchemas match: the user, and either a
// resource or a URL path.
type Request struct {
	User   string
	Groups []string
	Verb   string // verb of a resource request, or the HTTP method in lower case
	// Path is the URL path of a request that is not about a resource. It is empty if Resource is
	// not empty.
	Path string

	APIGroup    string
	Resource    string
	Subresource string
	Namespace   string // "" for cluster-scoped requests
}

// Flow identifies the FlowSchema that matches a request, and its PriorityLevelConfiguration. Level
// is empty if the PriorityLevelConfiguration does not exist.
type Flow struct {
	Schema, Level types.UID
}

// Schemas is an index of FlowSchemas in the order in which they are matched. It is immutable.
type Schemas struct {
	ordered []*flowcontrolv1.FlowSchema
	levels  map[string]types.UID
}

// NewSchemas returns an index of FlowSchemas. levels contains the UIDs of
// PriorityLevelConfigurations by name. The caller must not change schemas and levels afterwards. As
// in Kubernetes, schemas are ordered by matchingPrecedence, then by name.
func NewSchemas(schemas []*flowcontrolv1.FlowSchema, levels map[string]types.UID) *Schemas {
	ordered := slices.SortedFunc(slices.Values(schemas), func(a, b *flowcontrolv1.FlowSchema) int {
		return cmp.Or(cmp.Compare(a.Spec.MatchingPrecedence, b.Spec.MatchingPrecedence), cmp.Compare(a.Name, b.Name))
	})
	return &Schemas{ordered: ordered, levels: levels}
}

// Match returns the flow of the first FlowSchema that matches the request. found is false if no
// FlowSchema matches.
func (s *Schemas) Match(r *Request) (f Flow, found bool) {
	for _, schema := range s.ordered {
		for i := range schema.Spec.Rules {
			if matchesRules(&schema.Spec.Rules[i], r) {
				return Flow{Schema: schema.UID, Level: s.levels[schema.Spec.PriorityLevelConfiguration.Name]}, true
			}
		}
	}
	return Flow{}, false
}

// matchesRules reports whether the user matches a subject and the request matches a resource or URL
// rule.
func matchesRules(rules *flowcontrolv1.PolicyRulesWithSubjects, r *Request) bool {
	if !slices.ContainsFunc(rules.Subjects, func(s flowcontrolv1.Subject) bool { return matchesSubject(&s, r) }) {
		return false
	}
	if r.Resource != "" {
		return slices.ContainsFunc(rules.ResourceRules, func(rule flowcontrolv1.ResourcePolicyRule) bool {
			return matchesResource(&rule, r)
		})
	}
	return slices.ContainsFunc(rules.NonResourceRules, func(rule flowcontrolv1.NonResourcePolicyRule) bool {
		return containsOrAll(rule.Verbs, r.Verb) && slices.ContainsFunc(rule.NonResourceURLs, func(url string) bool {
			return matchesURL(url, r.Path)
		})
	})
}

func matchesSubject(s *flowcontrolv1.Subject, r *Request) bool {
	switch {
	case s.Kind == flowcontrolv1.SubjectKindUser && s.User != nil:
		return s.User.Name == flowcontrolv1.NameAll || s.User.Name == r.User
	case s.Kind == flowcontrolv1.SubjectKindGroup && s.Group != nil:
		return s.Group.Name == flowcontrolv1.NameAll || slices.Contains(r.Groups, s.Group.Name)
	case s.Kind == flowcontrolv1.SubjectKindServiceAccount && s.ServiceAccount != nil:
		name, ok := strings.CutPrefix(r.User, "system:serviceaccount:"+s.ServiceAccount.Namespace+":")
		return ok && (s.ServiceAccount.Name == flowcontrolv1.NameAll || s.ServiceAccount.Name == name)
	}
	return false
}

func matchesResource(rule *flowcontrolv1.ResourcePolicyRule, r *Request) bool {
	resource := r.Resource
	if r.Subresource != "" {
		resource += "/" + r.Subresource
	}
	if !containsOrAll(rule.Verbs, r.Verb) || !containsOrAll(rule.Resources, resource) ||
		!containsOrAll(rule.APIGroups, r.APIGroup) {
		return false
	}
	if r.Namespace == "" {
		return rule.ClusterScope
	}
	return containsOrAll(rule.Namespaces, r.Namespace)
}

// matchesURL reports whether a path equals the URL of a rule, or starts with it if the URL ends
// with an asterisk.
func matchesURL(url, path string) bool {
	prefix, below := strings.CutSuffix(url, "*")
	return url == path || below && strings.HasPrefix(path, prefix)
}

func containsOrAll(list []string, s string) bool {
	return slices.Contains(list, s) || slices.Contains(list, "*")
}
