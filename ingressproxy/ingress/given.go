package ingress

import (
	"fmt"
	"hash/fnv"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
)

// MaxShards is the maximum number of Secrets, called shards, in which the key pairs for the proxies
// of one IngressClass are stored.
const MaxShards = 8

// maxPairBytes is the maximum size of one key pair. It prevents that one Ingress uses up the space
// that all Ingresses of a class share.
const maxPairBytes = 64 << 10

// ShardName returns the name of the Secret that stores this shard of the key pairs of an
// IngressClass.
func ShardName(class string, shard int) string { return fmt.Sprintf("%s-pairs-%d", class, shard) }

// SecretShards distributes the key pairs that the Ingresses of a class name over at most MaxShards
// Secrets. The proxies of the class mount these Secrets. shards contains the data of each Secret,
// with the keys of pairs.FileNames; an empty shard needs no Secret. Key pairs of older Ingresses
// are placed first. unplaced contains the Secrets, as namespace/name, for which no space remains. A
// key pair keeps its shard when other key pairs are added, so that a change of one key pair writes
// one Secret.
func SecretShards(class string, all []*networkingv1.Ingress, w World, keys *pairs.Cache) (
	shards [MaxShards]map[string][]byte, unplaced map[string]bool,
) {
	unplaced = map[string]bool{}
	var used [MaxShards]int
	placed := map[string]bool{}
	for _, i := range ingressesOfClass(class, all) {
		for _, t := range i.Spec.TLS {
			name := i.Namespace + "/" + t.SecretName
			if t.SecretName == "" || placed[name] || unplaced[name] {
				continue
			}
			s := w.Secret(i.Namespace, t.SecretName)
			if _, problem := keyPair(s, keys); problem != "" {
				continue
			}
			shard, ok := shardFor(name, pairSize(s), &used)
			if !ok {
				unplaced[name] = true
				continue
			}
			placed[name] = true
			used[shard] += pairSize(s)
			if shards[shard] == nil {
				shards[shard] = map[string][]byte{}
			}
			certificate, key := pairs.FileNames(i.Namespace, t.SecretName)
			shards[shard][certificate], shards[shard][key] = s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
		}
	}
	return shards, unplaced
}

// shardFor returns the shard in which a key pair of this name and size is stored: the shard that a
// hash of the name selects, or the next shard with enough space. It returns false if no shard has
// enough space.
func shardFor(name string, size int, used *[MaxShards]int) (int, bool) {
	h := fnv.New32a()
	h.Write([]byte(name))
	first := int(h.Sum32() % MaxShards)
	for n := range MaxShards {
		if at := (first + n) % MaxShards; used[at]+size <= corev1.MaxSecretSize {
			return at, true
		}
	}
	return 0, false
}

func pairSize(s *corev1.Secret) int {
	return len(s.Data[corev1.TLSCertKey]) + len(s.Data[corev1.TLSPrivateKeyKey])
}
