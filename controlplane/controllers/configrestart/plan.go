// Package configrestart replaces the pods of workloads, on request, when what the ConfigMaps and Secrets hold that they
// refer to has changed.
package configrestart

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/podref"
)

// Ref is an object that a template refers to: "configmaps/web", "secrets/web".
type Ref string

// Refs are the ConfigMaps and Secrets of which containers see the contents. What only the node uses (credentials of
// image registries and volumes) is none of them.
func Refs(namespace string, t *corev1.PodTemplateSpec) []Ref {
	found := map[Ref]bool{}
	for r := range podref.Of(&corev1.Pod{ObjectMeta: t.ObjectMeta, Spec: t.Spec}) {
		if (r.Resource == "configmaps" || r.Resource == "secrets") && shown(r.Path()) {
			found[Ref(r.Resource+"/"+r.Name)] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

func shown(path string) bool {
	for _, part := range []string{".env[", ".envFrom[", ".volumes[].secret.", ".volumes[].configMap.", ".volumes[].projected."} {
		if strings.Contains(path, part) {
			return true
		}
	}
	return false
}

// State is what is known of each object: a digest of its contents, "" where there is none.
type State map[Ref]string

// digests are short: they tell versions of an object apart, and nothing rests on more.
const digestBytes = 10

func digest(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)[:digestBytes]) }

// OfConfigMap is the digest of what a ConfigMap holds.
func OfConfigMap(m *corev1.ConfigMap) string {
	h := sha256.New()
	for _, k := range slices.Sorted(maps.Keys(m.Data)) {
		put(h, k)
		put(h, m.Data[k])
	}
	put(h, "")
	for _, k := range slices.Sorted(maps.Keys(m.BinaryData)) {
		put(h, k)
		put(h, string(m.BinaryData[k]))
	}
	return digest(h)
}

// OfSecret is the digest of what a Secret holds. Who may read a workload and not the Secret does not find out by trying
// what it may hold: the Secret's uid, which is not told either, is the key.
func OfSecret(s *corev1.Secret) string {
	h := hmac.New(sha256.New, []byte(s.UID))
	for _, k := range slices.Sorted(maps.Keys(s.Data)) {
		put(h, k)
		put(h, string(s.Data[k]))
	}
	return digest(h)
}

func put(h hash.Hash, s string) {
	var size [8]byte
	binary.BigEndian.PutUint64(size[:], uint64(len(s)))
	h.Write(size[:])
	h.Write([]byte(s))
}

// maxRefs bounds what is kept with a workload: what it refers to beyond that, in the order of names, restarts nothing.
const maxRefs = 200

// Plan says what a workload has seen once this is done, and whether its pods are to be replaced for it: when an object
// holds something else than it did. One that is gone replaces none, for pods that are made without it might not start,
// and neither does one that comes for the first time: what needed it has waited for it.
func Plan(refs []Ref, seen, now State) (next State, replace bool) {
	next = State{}
	for _, r := range refs[:min(len(refs), maxRefs)] {
		was, known := seen[r]
		is := now[r]
		switch {
		case is == "":
			next[r] = was
		case known && was != "" && was != is:
			next[r], replace = is, true
		default:
			next[r] = is
		}
	}
	return next, replace
}

// String is the form in which a state is kept: "configmaps/a=0123456789,secrets/b=".
func (s State) String() string {
	var b strings.Builder
	for i, r := range s.refs() {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(string(r) + "=" + s[r])
	}
	return b.String()
}

func (s State) refs() []Ref { return slices.Sorted(maps.Keys(s)) }

// Parse reads the form back. What is none is left out: that object counts as new.
func Parse(text string) State {
	s := State{}
	for part := range strings.SplitSeq(text, ",") {
		if ref, d, ok := strings.Cut(part, "="); ok && strings.Contains(ref, "/") {
			s[Ref(ref)] = d
		}
	}
	return s
}
