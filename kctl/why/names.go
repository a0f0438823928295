package why

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// templateOwner returns the object that created pod p from its pod template, as a command argument
// such as "deployment/web". It returns "" for a pod without a controller.
func templateOwner(p *corev1.Pod) string {
	o := metav1.GetControllerOf(p)
	if o == nil {
		return ""
	}
	if hash := p.Labels["pod-template-hash"]; o.Kind == "ReplicaSet" && hash != "" {
		if of, ok := strings.CutSuffix(o.Name, "-"+hash); ok {
			return "deployment/" + of
		}
	}
	return strings.ToLower(o.Kind) + "/" + o.Name
}

// nearestWord returns the element of words with the smallest edit distance to word. It returns ""
// if every distance is larger than a third of the length of word. An element that equals word is
// skipped. It sorts words.
func nearestWord(word string, words []string) string {
	best, least := "", max(1, len(word)/3)+1
	slices.Sort(words)
	for _, w := range words {
		if d := editDistance(word, w); d < least && w != word {
			best, least = w, d
		}
	}
	return best
}

// editDistance returns the edit distance of a and b: the number of insertions, deletions,
// replacements and swaps of adjacent bytes.
func editDistance(a, b string) int {
	before, last := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		now := make([]int, len(b)+1)
		now[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			now[j] = min(last[j]+1, now[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				now[j] = min(now[j], before[j-2]+1)
			}
		}
		before, last = last, now
	}
	return last[len(b)]
}
