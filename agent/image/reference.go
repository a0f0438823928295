package image

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"keelson.dev/keelson/agent"
)

// reference is a parsed image name. String is its normalised form, in which images
// are stored: "docker.io/library/busybox:latest", "ghcr.io/a/b@sha256:...".
type reference struct {
	registry string // "docker.io"
	repo     string // "library/busybox"
	tag      string // "" when there is a digest
	digest   string // "sha256:..."; "" when there is a tag
}

func (r reference) String() string {
	if r.digest != "" {
		return r.repository() + "@" + r.digest
	}
	return r.repository() + ":" + r.tag
}

func (r reference) repository() string { return r.registry + "/" + r.repo }

// hub is what Docker Hub is called in image names, and what the library calls it.
const (
	hub        = "docker.io"
	libraryHub = "index.docker.io"
)

// parseReference reads an image name as users write it. The error wraps
// agent.ErrInvalidImage.
func parseReference(s string) (reference, error) {
	ref, err := name.ParseReference(s, name.WithDefaultRegistry(libraryHub))
	if err != nil {
		return reference{}, fmt.Errorf("%w: %q: %w", agent.ErrInvalidImage, s, err)
	}
	r := reference{registry: ref.Context().RegistryStr(), repo: ref.Context().RepositoryStr()}
	if r.registry == libraryHub {
		r.registry = hub
	}
	switch t := ref.(type) {
	case name.Digest:
		r.digest = t.DigestStr()
	case name.Tag:
		r.tag = t.TagStr()
	}
	return r, nil
}

var idPattern = regexp.MustCompile(`^(sha256:)?[0-9a-f]{12,64}$`)

// isID says that s can be the id of an image, or the start of one.
func isID(s string) bool { return idPattern.MatchString(s) }

// lookup finds an image by name, digest or id; "" when there is none. The caller
// holds s.mu.
func (s *Store) lookup(image string) string {
	if isID(image) {
		id := "sha256:" + strings.TrimPrefix(image, "sha256:")
		if s.images[id] != nil {
			return id
		}
		found := ""
		for other := range s.images {
			if strings.HasPrefix(other, id) {
				if found != "" {
					return "" // ambiguous
				}
				found = other
			}
		}
		if found != "" {
			return found
		}
	}
	r, err := parseReference(image)
	if err != nil {
		return ""
	}
	return s.names[r.String()]
}
