// Package configrestart replaces the pods of a workload when a ConfigMap or Secret to which its
// template refers has changed. It does this only for workloads with the annotation that requests
// it.
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

// Ref identifies a ConfigMap or Secret to which a pod template refers: "configmaps/web",
// "secrets/web".
type Ref string

// Refs returns the ConfigMaps and Secrets with contents that containers of the template can read.
// It does not return objects that only the node uses, such as credentials of image registries and
// volumes.
func Refs(namespace string, t *corev1.PodTemplateSpec) []Ref {
	found := map[Ref]bool{}
	for r := range podref.References(&corev1.Pod{ObjectMeta: t.ObjectMeta, Spec: t.Spec}) {
		if (r.Resource == "configmaps" || r.Resource == "secrets") && isShown(r.Path()) {
			found[Ref(r.Resource+"/"+r.Name)] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

func isShown(path string) bool {
	for _, part := range []string{".env[", ".envFrom[", ".volumes[].secret.", ".volumes[].configMap.",
		".volumes[].projected."} {
		if strings.Contains(path, part) {
			return true
		}
	}
	return false
}

// State maps each referenced object to a digest of its contents. The digest is "" if the object
// does not exist.
type State map[Ref]string

// digestBytes is the length of a digest. It is short because a digest only distinguishes versions
// of one object.
const digestBytes = 10

func digestString(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)[:digestBytes]) }

// OfConfigMap returns the digest of a ConfigMap's contents.
func OfConfigMap(m *corev1.ConfigMap) string {
	h := sha256.New()
	for _, k := range slices.Sorted(maps.Keys(m.Data)) {
		writeField(h, k)
		writeField(h, m.Data[k])
	}
	writeField(h, "")
	for _, k := range slices.Sorted(maps.Keys(m.BinaryData)) {
		writeField(h, k)
		writeField(h, string(m.BinaryData[k]))
	}
	return digestString(h)
}

// OfSecret returns the digest of a Secret's contents. It is keyed with the Secret's UID. A user who
// can read the workload but not the Secret can therefore not test guesses of its contents.
func OfSecret(s *corev1.Secret) string {
	h := hmac.New(sha256.New, []byte(s.UID))
	for _, k := range slices.Sorted(maps.Keys(s.Data)) {
		writeField(h, k)
		writeField(h, string(s.Data[k]))
	}
	return digestString(h)
}

func writeField(h hash.Hash, s string) {
	var size [8]byte
	binary.BigEndian.PutUint64(size[:], uint64(len(s)))
	h.Write(size[:])
	h.Write([]byte(s))
}

// maxRefs is the maximum number of references that are stored with a workload. Further references,
// in the order of names, cause no restart.
const maxRefs = 200

// PlanRestart compares the current digests of the objects to which a workload refers with the
// digests stored in the workload. It returns the digests to store, and whether the pods must be
// replaced because an object has changed. A deleted object causes no replacement, because new pods
// might not start without it. A created object causes no replacement, because the pods that need it
// have waited for it.
func PlanRestart(refs []Ref, stored, current State) (next State, replace bool) {
	next = State{}
	for _, r := range refs[:min(len(refs), maxRefs)] {
		was, known := stored[r]
		is := current[r]
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

// String returns the stored form of a state: "configmaps/a=0123456789,secrets/b=".
func (s State) String() string {
	var b strings.Builder
	for i, r := range s.sortedRefs() {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(string(r) + "=" + s[r])
	}
	return b.String()
}

func (s State) sortedRefs() []Ref { return slices.Sorted(maps.Keys(s)) }

// Parse returns the State that String has formatted. It skips invalid parts: their objects count as
// new.
func Parse(text string) State {
	s := State{}
	for part := range strings.SplitSeq(text, ",") {
		if ref, d, ok := strings.Cut(part, "="); ok && strings.Contains(ref, "/") {
			s[Ref(ref)] = d
		}
	}
	return s
}
