package ingress

import (
	"fmt"
	"hash/fnv"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
)

// Shards is how many Secrets at most hold the key pairs that the proxies of one class are given.
const Shards = 8

// mostPair bounds one pair in bytes, so that nobody takes much of the room that all Ingresses of a class share.
const mostPair = 64 << 10

// ShardName is the name of such a Secret.
func ShardName(class string, shard int) string { return fmt.Sprintf("%s-pairs-%d", class, shard) }

// Given are the key pairs of the Ingresses of a class as the files that its proxies are given (pairs.Files), Shard by
// shard; an empty one needs no Secret. There is room for the older Ingresses' first: left are the Secrets, by namespace
// and name, for which there is none. A pair keeps its shard while others come, so that one change writes one Secret.
func Given(class string, all []*networkingv1.Ingress, w World, keys *pairs.Keys) (given [Shards]map[string][]byte, left map[string]bool) {
	left = map[string]bool{}
	var used [Shards]int
	placed := map[string]bool{}
	for _, i := range ofClass(class, all) {
		for _, t := range i.Spec.TLS {
			name := i.Namespace + "/" + t.SecretName
			if t.SecretName == "" || placed[name] || left[name] {
				continue
			}
			s := w.Secret(i.Namespace, t.SecretName)
			if _, problem := keyPair(s, keys); problem != "" {
				continue
			}
			shard, ok := shardFor(name, pairSize(s), &used)
			if !ok {
				left[name] = true
				continue
			}
			placed[name] = true
			used[shard] += pairSize(s)
			if given[shard] == nil {
				given[shard] = map[string][]byte{}
			}
			certificate, key := pairs.Files(i.Namespace, t.SecretName)
			given[shard][certificate], given[shard][key] = s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
		}
	}
	return given, left
}

// shardFor is the shard of a pair: the one that its name says, or the next with room.
func shardFor(name string, size int, used *[Shards]int) (int, bool) {
	h := fnv.New32a()
	h.Write([]byte(name))
	first := int(h.Sum32() % Shards)
	for n := range Shards {
		if at := (first + n) % Shards; used[at]+size <= corev1.MaxSecretSize {
			return at, true
		}
	}
	return 0, false
}

func pairSize(s *corev1.Secret) int {
	return len(s.Data[corev1.TLSCertKey]) + len(s.Data[corev1.TLSPrivateKeyKey])
}
