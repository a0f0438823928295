package dns

import (
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"

	"keelson.dev/keelson/agent/dns/corefile"
	"keelson.dev/keelson/agent/dns/zone"
)

// rewrittenQuery is a query to which the rewrite rules of the Corefile have been applied. It
// includes the rules that rewrite the query's answer.
type rewrittenQuery struct {
	name  string
	kind  uint16
	rules []corefile.AnswerRule
}

// rewriteQuery applies the rewrite rules, in order, to a query for name of type kind. The first
// matching rule ends the evaluation, unless it specifies "continue".
func rewriteQuery(rules []corefile.Rewrite, name string, kind uint16) rewrittenQuery {
	out := rewrittenQuery{name: name, kind: kind}
	for i := range rules {
		r := &rules[i]
		if r.Kind == "type" {
			if r.FromType != out.kind {
				continue
			}
			out.kind = r.ToType
		} else {
			to, ok := applyRule(r, out.name)
			if !ok {
				continue
			}
			out.name = to
		}
		out.rules = append(out.rules, r.Answers...)
		if !r.Continue {
			break
		}
	}
	return out
}

// applyRule returns the name as rewritten by the rule r. ok is false if the rule does not match or
// if the new name is invalid.
func applyRule(r *corefile.Rewrite, name string) (newName string, ok bool) {
	switch r.Kind {
	case "exact":
		newName, ok = r.To, name == r.From
	case "prefix":
		newName, ok = strings.CutPrefix(name, r.From)
		newName = r.To + newName
	case "suffix":
		newName, ok = strings.CutSuffix(name, r.From)
		newName += r.To
	case "substring":
		ok = strings.Contains(name, r.From)
		newName = strings.ReplaceAll(name, r.From, r.To)
	case "regex":
		if m := r.Pattern.FindStringSubmatch(name); m != nil {
			newName, ok = expandGroups(r.To, m), true
		}
	}
	if !ok {
		return "", false
	}
	newName = strings.ToLower(dns.Fqdn(newName))
	if _, valid := dns.IsDomainName(newName); !valid || len(newName) > 254 {
		return "", false
	}
	return newName, true
}

// expandGroups replaces {1}, {2} and so on in replacement with the matched groups of a regular
// expression.
func expandGroups(replacement string, groups []string) string {
	for i := 1; i < len(groups); i++ {
		replacement = strings.ReplaceAll(replacement, "{"+strconv.Itoa(i)+"}", groups[i])
	}
	return replacement
}

// restoreNames changes the names in m, the answer to a rewritten query. It replaces the rewritten
// name by originalName, and then applies the answer rules.
func (w rewrittenQuery) restoreNames(m *dns.Msg, originalName string) {
	for _, section := range [][]dns.RR{m.Answer, m.Extra} {
		for _, rr := range section {
			h := rr.Header()
			if h.Rrtype == dns.TypeOPT {
				continue
			}
			if w.name != strings.ToLower(originalName) && strings.EqualFold(h.Name, w.name) {
				h.Name = originalName
			}
			for _, r := range w.rules {
				if r.Values {
					rewriteAnswerValue(rr, r)
				} else if n, ok := rewriteAnswerName(h.Name, r); ok {
					h.Name = n
				}
			}
		}
	}
}

func rewriteAnswerName(name string, r corefile.AnswerRule) (string, bool) {
	m := r.Pattern.FindStringSubmatch(name)
	if m == nil {
		return "", false
	}
	to := dns.Fqdn(expandGroups(r.To, m))
	_, ok := dns.IsDomainName(to)
	return to, ok && len(to) <= 254
}

func rewriteAnswerValue(rr dns.RR, r corefile.AnswerRule) {
	var to *string
	switch rr := rr.(type) {
	case *dns.CNAME:
		to = &rr.Target
	case *dns.SRV:
		to = &rr.Target
	case *dns.PTR:
		to = &rr.Ptr
	case *dns.MX:
		to = &rr.Mx
	default:
		return
	}
	if n, ok := rewriteAnswerName(*to, r); ok {
		*to = n
	}
}

// rotateAddresses rotates the address records at the end of an answer by rotation positions.
// Clients that use the first address are thus distributed over all addresses.
func rotateAddresses(rrs []dns.RR, rotation uint32) {
	first := slices.IndexFunc(rrs, func(rr dns.RR) bool {
		t := rr.Header().Rrtype
		return t == dns.TypeA || t == dns.TypeAAAA
	})
	if first < 0 {
		return
	}
	tail := rrs[first:]
	kind := tail[0].Header().Rrtype
	if slices.ContainsFunc(tail, func(rr dns.RR) bool { return rr.Header().Rrtype != kind }) {
		return
	}
	zone.Rotate(tail, rotation)
}
