package kctl

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/tools/clientcmd"
)

// unconfiguredServer is the API server address to which client-go connects if no kubeconfig selects
// a cluster.
const unconfiguredServer = "localhost:8080"

// kubeconfigHint is the end of an error about an unreachable API server. It suggests another
// kubeconfig.
const kubeconfigHint = "set another kubeconfig with KUBECONFIG or --kubeconfig"

// Patterns of error texts for an unreachable API server, from Go's net package and from kubectl.
// The first group of each pattern is the address or the host name.
var (
	unresolved = regexp.MustCompile(`dial tcp: lookup (\S+?)(?: on \S+)?: (no such host|server ` +
		`misbehaving|.*[Tt]emporary failure.*|.*i/o timeout)`)
	refusedDial = regexp.MustCompile(`dial tcp (\S+): connect: connection refused`)
	refusedText = regexp.MustCompile(`^The connection to the server (\S+) was refused`)
	silentDial  = regexp.MustCompile(`dial tcp (\S+): (?:connect: )?(i/o timeout|no route to host|network is ` +
		`unreachable|connection timed out)`)
)

// explainUnreachable returns a sentence with the reason and the remedy if text is a client error
// about an unreachable API server. It returns "" for other errors.
func explainUnreachable(text string) string {
	if strings.Contains(text, unconfiguredServer) {
		return explainNoCluster()
	}
	if m := unresolved.FindStringSubmatch(text); m != nil {
		return fmt.Sprintf("the host %s of the API does not resolve (%s): correct the server in the kubeconfig or the "+
			"DNS of this machine, or %s",
			m[1], m[2], kubeconfigHint)
	}
	for _, form := range []*regexp.Regexp{refusedText, refusedDial} {
		if m := form.FindStringSubmatch(text); m != nil {
			return fmt.Sprintf("no API server responds at %s (connection refused): start the control plane there "+
				"('kctl lab up' in a lab), or %s", m[1], kubeconfigHint)
		}
	}
	if m := silentDial.FindStringSubmatch(text); m != nil {
		return fmt.Sprintf("no API server responds at %s (%s): check the routes and firewalls between this machine "+
			"and the control plane, or %s",
			m[1], m[2], kubeconfigHint)
	}
	return ""
}

// explainNoCluster returns a sentence with the reason why no cluster is configured, and the remedy.
// The reason depends on $KUBECONFIG.
func explainNoCluster() string {
	const remedy = "start one on this machine with 'kctl lab up', or set KUBECONFIG or --kubeconfig"
	files := filepath.SplitList(os.Getenv(clientcmd.RecommendedConfigPathEnvVar))
	missing := slices.DeleteFunc(slices.Clone(files), func(file string) bool {
		_, err := os.Stat(file)
		return err == nil
	})
	switch {
	case len(files) > 0 && len(missing) == len(files):
		return fmt.Sprintf("KUBECONFIG is %s, which does not exist, so no cluster is configured: %s",
			strings.Join(missing, " and "), remedy)
	case len(files) > 0:
		return fmt.Sprintf("KUBECONFIG is %s, which has no cluster in its current context: %s",
			strings.Join(files, " and "), remedy)
	}
	return "no cluster is configured: " + remedy
}

// errorText returns the text of err. If the API server is unreachable, the part of the text about
// that is replaced with the sentence of explainUnreachable. An error response of the API server
// stays unchanged, even if it is about a connection that the API server could not make.
func errorText(err error) string {
	text := err.Error()
	var answer apierrors.APIStatus
	var client *url.Error
	if errors.As(err, &answer) || !errors.As(err, &client) {
		return text
	}
	if sentence := explainUnreachable(client.Error()); sentence != "" {
		return strings.Replace(text, client.Error(), sentence, 1)
	}
	return text
}

// unreachablePrefixes are the texts with which kubectl starts an error about an unreachable API
// server.
var unreachablePrefixes = []string{"The connection to the server ", "Unable to connect to the server: ",
	"error validating data: failed to download openapi: Get "}

// fatalText returns text, the error text of a kubectl command, without trailing newlines. If it is
// about an unreachable API server, it returns the sentence of explainUnreachable instead.
func fatalText(text string) string {
	text = strings.TrimRight(text, "\n")
	if slices.ContainsFunc(unreachablePrefixes, func(words string) bool { return strings.Contains(text, words) }) {
		if sentence := explainUnreachable(text); sentence != "" {
			return "error: " + sentence
		}
	}
	return text
}

// silenceDiscovery stops client-go from logging each failed discovery request. The command reports
// the failure once, when it exits.
func silenceDiscovery() {
	for i, handle := range utilruntime.ErrorHandlers {
		utilruntime.ErrorHandlers[i] = func(ctx context.Context, err error, msg string, keysAndValues ...any) {
			var client *url.Error
			if !errors.As(err, &client) {
				handle(ctx, err, msg, keysAndValues...)
			}
		}
	}
}
