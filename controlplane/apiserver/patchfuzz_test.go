package apiserver

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// junk returns a random value of words that occur in patches.
func junk(r *rand.Rand, depth int) any {
	words := []string{"metadata", "spec", "template", "containers", "name", "env", "ports", "containerPort", "labels", "$patch", "replace", "delete",
		"merge", "$setElementOrder/containers", "$deleteFromPrimitiveList/finalizers", "$retainKeys", "finalizers", "volumes", "strategy", "selector",
		"matchLabels", "image", "replicas", "tolerations", "ownerReferences", "uid", "$setElementOrder/env", "conditions", "status", "managedFields", "annotations"}
	word := func() string { return words[r.IntN(len(words))] }
	switch n := r.IntN(10); {
	case depth <= 0 || n < 3:
		return []any{nil, 1, -1.5, true, "", word(), "x"}[r.IntN(7)]
	case n < 5:
		out := make([]any, r.IntN(4))
		for i := range out {
			out[i] = junk(r, depth-1)
		}
		return out
	default:
		out := map[string]any{}
		for range r.IntN(5) {
			out[word()] = junk(r, depth-1)
		}
		return out
	}
}

// rooted returns junk at existing paths, so that merging reaches it.
func rooted(r *rand.Rand) any {
	pod := map[string]any{"containers": junk(r, 4), "volumes": junk(r, 3)}
	if r.IntN(2) == 0 {
		pod["containers"] = []any{map[string]any{"name": "c", "env": junk(r, 3), "ports": junk(r, 3)}, junk(r, 3)}
	}
	return map[string]any{"metadata": junk(r, 3), "spec": map[string]any{
		"template": map[string]any{"metadata": junk(r, 3), "spec": pod}, "strategy": junk(r, 3), "selector": junk(r, 3)}, "status": junk(r, 3)}
}

// Patches of every type, made at random of the words that matter, are answered and never crash.
func TestRandomPatches(t *testing.T) {
	r := start(t, nil)
	client := r.adminHTTP()
	deployment := `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d","finalizers":["a.b/c"]},"spec":{"selector":{"matchLabels":{"a":"b"}},
		"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i","env":[{"name":"e","value":"v"}],"ports":[{"containerPort":80}]}]}}}}`
	const path = "/apis/apps/v1/namespaces/default/deployments"
	if got := r.call(client, "POST", path, deployment, "Content-Type", "application/json"); got.code != 201 {
		t.Fatalf("%d %s", got.code, got.body)
	}
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	codes := map[string]int{}
	for i := range 1500 {
		media := []string{"application/strategic-merge-patch+json", "application/strategic-merge-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"}[i%4]
		var v any = rooted(random)
		if random.IntN(4) == 0 {
			v = junk(random, 5)
		}
		if m, ok := v.(map[string]any); ok && strings.Contains(media, "apply") {
			m["apiVersion"], m["kind"] = "apps/v1", "Deployment"
		}
		body, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		query := "?dryRun=All"
		if strings.Contains(media, "apply") {
			query += "&force=true&fieldManager=m"
		}
		got := r.call(client, "PATCH", path+"/d"+query, string(body), "Content-Type", media)
		codes[fmt.Sprint(media[12:17], " ", got.code)]++
		if got.code >= 500 {
			t.Errorf("seed %d, %s of %.600s: %d %.300s", seed, media, body, got.code, got.body)
		}
	}
	t.Logf("answers: %v", codes)
}
