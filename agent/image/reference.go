package image

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"keelson.dev/keelson/agent"
)

// reference is a parsed image name. String returns its normalized form, under which images are
// stored: "docker.io/library/busybox:latest", "ghcr.io/a/b@sha256:...".
type reference struct {
	registry string // "docker.io"
	repo     string // "library/busybox"
	tag      string // "" when there is a digest
	digest   string // "sha256:..."; "" when there is a tag
}

func (r reference) String() string {
	if r.digest != "" {
		return r.repositoryName() + "@" + r.digest
	}
	return r.repositoryName() + ":" + r.tag
}

func (r reference) repositoryName() string { return r.registry + "/" + r.repo }

// dockerHub is the host of Docker Hub in image names. libraryDockerHub is the host name that the
// registry library (go-containerregistry) uses for Docker Hub.
const (
	dockerHub        = "docker.io"
	libraryDockerHub = "index.docker.io"
)

// parseReference parses an image name as written by users. The error wraps agent.ErrInvalidImage.
func parseReference(s string) (reference, error) {
	ref, err := name.ParseReference(s, name.WithDefaultRegistry(libraryDockerHub))
	if err != nil {
		return reference{}, fmt.Errorf("%w: %q: %w", agent.ErrInvalidImage, s, err)
	}
	r := reference{registry: ref.Context().RegistryStr(), repo: ref.Context().RepositoryStr()}
	if r.registry == libraryDockerHub {
		r.registry = dockerHub
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

// isID reports whether s has the syntax of an image ID or of a prefix of an image ID.
func isID(s string) bool { return idPattern.MatchString(s) }

// lookupID returns the ID of the image with this name, digest or ID prefix. It returns "" if no
// image matches, or if a prefix is ambiguous. The caller holds s.mu.
func (s *Store) lookupID(image string) string {
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
