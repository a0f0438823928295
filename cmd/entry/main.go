// Keelson-entry is the proxy in front of Services. It runs in pods that the control plane makes for an IngressClass or
// for a Gateway.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/ingressproxy/live"
	"keelson.dev/keelson/ingressproxy/serve"
)

var version = "dev"

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, log, os.Args[1:]); err != nil && !errors.Is(err, context.Canceled) {
		log.Error("stopped", "err", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, log *slog.Logger, args []string) error {
	f := flag.NewFlagSet("keelson-entry", flag.ContinueOnError)
	class := f.String("ingress-class", "", "serve the Ingresses of this IngressClass")
	of := f.String("gateway", "", "serve this Gateway, as NAMESPACE/NAME")
	certificates := f.String("certificates", "/certificates", "folder of the key pairs that the control plane has put there")
	status := f.String("status-address", ":10254", "where /healthz, /readyz and /metrics are")
	access := f.Bool("access-log", false, "write a line for each request")
	trusted := f.String("trusted-proxies", "", "prefixes, with commas between, whose X-Forwarded headers are believed")
	linger := f.Duration("linger", 5*time.Second, "how long connections are taken after SIGTERM, while the way here is forgotten elsewhere")
	if err := f.Parse(args); err != nil {
		return fmt.Errorf("reading the flags: %w", err)
	}
	namespace, name, isName := strings.Cut(*of, "/")
	if (*class == "") == (*of == "") || *of != "" && (!isName || namespace == "" || name == "") || f.NArg() > 0 {
		return errors.New("usage: keelson-entry --ingress-class NAME | --gateway NAMESPACE/NAME [--certificates FOLDER] [--access-log] [--trusted-proxies PREFIX,...] [--status-address :PORT] [--linger DURATION]")
	}
	opts := serve.Options{Log: log, Linger: *linger}
	if *access {
		opts.Access = log
	}
	for text := range strings.SplitSeq(*trusted, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return fmt.Errorf("--trusted-proxies: %w", err)
		}
		opts.Trusted = append(opts.Trusted, p)
	}
	api, err := rest.InClusterConfig()
	if err != nil {
		return fmt.Errorf("finding the API: %w (keelson-entry runs in a pod)", err)
	}
	api.UserAgent = "keelson-entry/" + version
	s := serve.New(opts)
	log.Info("starting", "version", version, "class", *class, "gateway", *of)
	g, ctx := errgroup.WithContext(ctx)
	pages := statusServer(*status, s)
	served := make(chan struct{})
	g.Go(func() error { defer close(served); return s.Run(ctx) })
	g.Go(func() error {
		source := live.Ingresses(*class)
		if *of != "" {
			own, err := portOf(*status)
			if err != nil {
				return fmt.Errorf("--status-address: %w", err)
			}
			source = live.Gateway(namespace, name, []int32{own})
		}
		return live.Run(ctx, live.Config{API: api, Source: source, Certificates: *certificates, Swap: s.Swap, Log: log})
	})
	g.Go(func() error {
		if err := pages.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving %s: %w", *status, err)
		}
		return nil
	})
	g.Go(func() error {
		<-served
		return pages.Close()
	})
	return g.Wait()
}

// portOf is the port of an address.
func portOf(address string) (int32, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return int32(n), err
}

func statusServer(at string, s *serve.Server) *http.Server {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(s.Collector(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !s.Ready() {
			http.Error(w, "no table is served yet, or the end is near", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	return &http.Server{Addr: at, Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
}
